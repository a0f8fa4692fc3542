"""The arguments of a training forward of any size: inputs, masks and labels, on fake tensors or real ones."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from memopt.torch_compat import FakeTensor, FakeTensorMode, no_dispatch, run_backward, set_known_values, tree_map
from memopt.trace.calls import counted_calls
from memopt.trace.emulate import AnyGroupedProduct, CudaChoices, unpadded_masks
from memopt.trace.fake import FakeReads, Fakes, FiniteValues, make_fake
from memopt.trace.kernels import STAND_INS
from memopt.trace.timeline import Timeline, losses_of
from memopt.trace.training import Precision, Training
from memopt.walk.calls.arguments.request import Size
from memopt.walk.calls.batch import Batch, placed
from memopt.walk.calls.inputs import MASKS, Call, masked, runs_there, step_inputs, training_targets
from memopt.walk.flow.watch import autocast_of_meta
from memopt.walk.models.alike import take_out
from memopt.walk.models.build import build_meta, run_experts
from memopt.walk.models.plain import plain_functions
from memopt.walk.sites import FunctionSite, Sites

#: Precision -> (dtype of the weights, dtype of autocast or None).
DTYPES: dict[Precision, tuple[torch.dtype, torch.dtype | None]] = {
    "fp32": (torch.float32, None),
    "bf16": (torch.bfloat16, None),
    "fp16": (torch.float16, None),
    "bf16-mixed": (torch.float32, torch.bfloat16),
    "fp16-mixed": (torch.float32, torch.float16),
    "bf16-autocast": (torch.bfloat16, torch.bfloat16),
}
#: Dtype of the weights -> precision without autocast.
PRECISIONS = {weights: name for name, (weights, autocast) in DTYPES.items() if autocast is None}


def dtypes_of(training: Training) -> tuple[torch.dtype, torch.dtype | None]:
    """The dtype of the weights in forward and backward, and that of autocast or None."""
    weights, autocast = DTYPES[training.precision]
    return (autocast or weights if training.gathers_16_bits else weights), autocast


@dataclass(frozen=True)
class Example:
    """The arguments of one training forward, found by running a few blocks of the model on the meta device, which is
    fast.

    Floating tensors are on meta, other inputs have values.
    """

    inputs: Mapping[str, Any]
    targets: Mapping[str, Any]
    """Labels, or other arguments that make the forward return a loss; empty if none do."""
    is_read: bool
    """Whether the step reads values of the inputs (sizes of images), so that it cannot be traced by shapes alone."""


def example_of(config: PreTrainedConfig, sites: Sites, training: Training) -> Example:
    """The arguments of one forward of the size of `training`. Raises a ModelError if none of the model's are
    recognised."""
    alone = Training(training.batch, training.seq, training.precision, dropout=training.dropout)
    size = replace(alone, images=training.images, image_side=training.image_side)
    return _example(_Model(config, sites), size)


def step_arguments(
    model: PreTrainedModel, training: Training, source: Example | Batch, *, real: bool = False
) -> dict[str, Any]:
    """Keyword arguments of one training forward, with labels if the model takes them. `source` is an example of the
    size of `training`, or a user's batch. `real`: `model` has values; by default it is on fake tensors, and a fake mode
    is active."""
    dtype = DTYPES[training.precision][0]
    if isinstance(source, Example):
        valued = real or source.is_read
        inputs, targets = _like(source.inputs, dtype, valued), _like(source.targets)
        made = inputs.keys() & MASKS
    else:
        batch = _like(source, dtype, valued=True)
        inputs = masked(model, batch)
        targets = {}
        made = inputs.keys() - batch.keys()
    for name in made:
        _with_values(inputs[name], 1)
    if not isinstance(source, Example) and "labels" not in inputs:
        targets = training_targets(model, inputs, run=None if real else _run_without_values)
    return {**{name: _counted(name, target) for name, target in targets.items()}, **inputs}


@dataclass(frozen=True, eq=False)
class _Model:
    """A cache key: equal to a key that holds the same two objects."""

    config: PreTrainedConfig
    sites: Sites

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Model) and self.config is other.config and self.sites is other.sites

    def __hash__(self) -> int:
        return hash((id(self.config), id(self.sites)))


@lru_cache(maxsize=8)
def _example(of: _Model, size: Training) -> Example:
    finder = _finder(of, size.precision, size.dropout)
    if of.sites.functions and finder.by_shapes is None and (size.seq or 0) > _SHORT:
        finder.find(replace(size, seq=_SHORT))  # a scan is slow, so attempts are made on a short row
    return finder.find(size)


#: Tokens in a row for the first attempts on a model with scans.
_SHORT = 256


@lru_cache(maxsize=8)
def _finder(of: _Model, precision: Precision, dropout: bool) -> _Finder:
    model = build_meta(of.config, dtype=DTYPES[precision][0])
    run_experts(model, "grouped_mm")
    model.train(dropout)
    short = copy.deepcopy(model)
    take_out(short, of.sites.blocks, groups=1)
    return _Finder(model, short, of.sites.functions)


@dataclass(eq=False)
class _Finder:
    """Finds examples of any size on the meta device."""

    model: PreTrainedModel
    short: PreTrainedModel
    """`model` with a few blocks."""
    functions: Sequence[FunctionSite]
    by_shapes: int | None = None
    """Index of the candidate arguments that run without values, which serve every size; None if not known."""
    first: Example | None = None
    """The first example with these candidate arguments."""

    def find(self, size: Training) -> Example:
        tried = itertools.count()

        def runs(given: dict[str, Any]) -> bool:
            number = next(tried)
            if self.by_shapes is None:
                return runs_there(self.short, given, _run_without_values)
            return number == self.by_shapes

        with plain_functions(self.model, STAND_INS):
            with AnyGroupedProduct(), autocast_of_meta():
                inputs = step_inputs(self.short, _size(size), runs=runs)
                targets = self._like_inputs(inputs) or training_targets(
                    self.short, placed(inputs, "meta", self.model.dtype), run=_run_without_values
                )
            likeliest = Example(MappingProxyType(inputs), MappingProxyType(targets), is_read=True)
            if self.by_shapes is not None:
                return replace(likeliest, is_read=False)
            # Checked on fake tensors: meta tensors accept shapes that others do not. A model may need all its blocks.
            found = _that_runs(copy.deepcopy(self.short), size, self.functions, likeliest)
            if found is not None and found.inputs is likeliest.inputs and not found.is_read and targets:
                self.by_shapes, self.first = next(tried) - 1, found
            return found or _that_runs(copy.deepcopy(self.model), size, self.functions) or likeliest

    def _like_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Targets for `inputs`, if every target of the first example has the shape of one of its inputs; else {}."""
        found: dict[str, Any] = {}
        if (first := self.first) is None:
            return found
        for name, target in first.targets.items():
            like = (each for each, value in first.inputs.items() if _shape(value) == _shape(target) is not None)
            if (known := next(like, None)) is None:
                return {}
            found[name] = target.new_zeros(inputs[known].shape)
        return found


def _size(of: Training) -> Size:
    return Size(of.batch, of.seq, of.images, of.image_side)


def _shape(value: Any) -> torch.Size | None:
    return value.shape if isinstance(value, Tensor) else None


def _that_runs(
    model: PreTrainedModel, size: Training, functions: Iterable[FunctionSite], example: Example | None = None
) -> Example | None:
    """`example`, by default the first candidate, with targets and `is_read`; None if `model` does not run with it. The
    tensors of `model` become fake. Of the calls of `functions`, one of each form runs."""
    fake = Fakes()
    make_fake(model, fake)

    def runs(inputs: Mapping[str, Any]) -> bool:
        with contextlib.suppress(Exception), _reading(fake), CudaChoices(), torch.no_grad():
            model(**_like(inputs, model.dtype, valued=True))
            return True
        return False

    def with_targets(inputs: Mapping[str, Any]) -> Example:
        with _reading(fake):
            targets = training_targets(model, _like(inputs, model.dtype, valued=True), run=_run_without_values)
        return Example(MappingProxyType(dict(inputs)), MappingProxyType(targets), is_read=True)

    if example is None:
        example = with_targets(step_inputs(model, _size(size), runs=runs))
    elif not example.targets:  # on the meta device a forward that reads values returns no loss
        example = with_targets(example.inputs)
    if _runs_without_values(model, fake, size, replace(example, is_read=False), functions):
        return replace(example, is_read=False)
    return example if runs(example.inputs) else None


@contextlib.contextmanager
def _reading(fake: FakeTensorMode) -> Iterator[None]:
    with fake, FiniteValues(), unpadded_masks(), FakeReads():
        yield


def _runs_without_values(
    model: PreTrainedModel, fake: FakeTensorMode, size: Training, example: Example, functions: Iterable[FunctionSite]
) -> bool:
    timeline = Timeline(model)
    calls = counted_calls(functions, True, timeline)
    try:
        with fake, FiniteValues(), unpadded_masks(), CudaChoices(), timeline, calls:
            run_backward(*losses_of(model(**step_arguments(model, size, example))))
    except Exception:  # it may fail with values too; the trace then raises the error
        return False
    return True


def _counted(name: str, target: Any) -> Any:
    """Labels of which none is ignored: the bytes of a loss depend on the number of rows that count. A mask of ones."""
    if not isinstance(target, Tensor) or target.is_floating_point():
        return target
    value = int(name.endswith("mask"))
    return _with_values(torch.full_like(target, value), value)


def _with_values(tensor: Tensor, value: int) -> Tensor:
    if isinstance(tensor, FakeTensor):
        with no_dispatch():
            set_known_values(tensor, torch.full(tensor.shape, value, dtype=tensor.dtype))
    return tensor


def _like(arguments: Mapping[str, Any], dtype: torch.dtype | None = None, valued: bool = False) -> dict[str, Any]:
    """Fake tensors in a trace, else ones and zeros, floating ones in `dtype`; with `valued`, others keep values."""

    def like(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or (valued and not (leaf.is_meta or leaf.is_floating_point())):
            return leaf
        # Not zeros: some models drop images that are 0 everywhere. Fake, and so are integers cast from it.
        numbers = torch.full(leaf.shape, float(leaf.is_floating_point()), dtype=dtype or leaf.dtype)
        return numbers if leaf.is_floating_point() else numbers.to(leaf.dtype)

    return {name: tree_map(like, value) for name, value in arguments.items()}


def _run_without_values(model: nn.Module, call: Call) -> Any:
    """Logits and loss, by which labels are chosen; the loss on meta, since a fake loss cannot be tested for NaN."""
    # Without known values a test of labels ("all below the size of the vocabulary?") reads as True.
    counted = {name: _counted(name, value) if name.endswith("labels") else value for name, value in call.kwargs.items()}
    with CudaChoices():
        output = replace(call, kwargs=counted).run(model)
    loss = getattr(output, "loss", None)
    return SimpleNamespace(logits=getattr(output, "logits", None), loss=None if loss is None else loss.to("meta"))
