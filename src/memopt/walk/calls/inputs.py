"""Inputs for a model, from the signature of its forward, its `main_input_name` and its config.

`runnable_calls` returns the calls that were tried and ran, `step_inputs` the arguments of a training step,
`training_targets` the labels with which a model returns a loss. `memopt.walk.calls.arguments` proposes arguments;
`memopt.walk.calls.parts` calls the parts that the model's forward does not reach.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from memopt.errors import ModelError
from memopt.walk.aten.meta_reads import MetaReads
from memopt.walk.aten.precision import precise
from memopt.walk.calls.arguments import candidates
from memopt.walk.calls.arguments.elsewhere import foreign
from memopt.walk.calls.arguments.request import Size, forward_parameters, inner_model
from memopt.walk.calls.batch import placed
from memopt.walk.calls.preserve import preserved
from memopt.walk.models.config import one_line

Variant = Literal["plain", "padded", "odd"]
#: Mask -> the token ids that it masks.
MASKS = {"attention_mask": "input_ids", "decoder_attention_mask": "decoder_input_ids"}
VARIANTS: tuple[Variant, ...] = get_args(Variant)
#: The label value that torch's and transformers' losses skip.
IGNORED = -100


@dataclass(frozen=True)
class Call:
    """One way to call a model: its forward, or that of a part, or a method of either."""

    label: str
    kwargs: dict[str, Any]
    part: str = ""
    """Name of the submodule that is called; the model itself by default."""
    method: str = ""
    """Name of the method that is called; the module, hooks and all, by default."""
    detail: str = ""
    """The form of the inputs, where there are several, as ``patches of 1176``."""

    @property
    def name(self) -> str:
        """The label and the detail, for errors."""
        return f"{self.label} ({self.detail})" if self.detail else self.label

    @property
    def target(self) -> str:
        """Dotted name of the part and method that are called, empty for the model itself."""
        return ".".join(filter(None, (self.part, self.method)))

    def run(self, model: nn.Module) -> Any:
        """Run the call and return its output; arguments are passed as they are, not copied."""
        module = model.get_submodule(self.part)
        return getattr(module, self.method)(**self.kwargs) if self.method else module(**self.kwargs)

    def copied(self) -> Call:
        """This call with copies of its arguments, since a forward may write into them."""
        own = {n: v.clone() if isinstance(v, torch.Tensor) else copy.copy(v) for n, v in self.kwargs.items()}
        return replace(self, kwargs=own)


#: Function that runs a call; the walk passes one that observes the call.
Runner = Callable[[nn.Module, Call], Any]


class Calls(list[Call]):
    """The calls that ran, and the errors of the others."""

    def __init__(self, calls: Sequence[Call] = (), errors: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(calls)
        self.errors = tuple(errors)
        """(label, error) of every call that was tried and did not run."""


def step_inputs(
    model: nn.Module, size: Size, *, runs: Callable[[dict[str, Any]], bool] | None = None
) -> dict[str, Any]:
    """Keyword arguments of a training forward of `size`: the first candidate that runs; if none runs, the likeliest.

    Integers are on the CPU and have values, floating tensors are on meta. Token ids come with a mask of ones, where the
    forward takes one and runs with it.

    Args:
        model: in the mode of the step; on the meta device without `runs`.
        runs: whether a forward runs with given arguments; by default, it is tried on the meta device.

    Raises:
        ModelError: the model has no transformers config, or no arguments of its forward are recognised.
    """
    first: dict[str, Any] | None = None
    for _, kwargs in candidates(model, "plain", 0, size=size):
        for given in (masked(model, kwargs), kwargs):
            first = first or given
            if runs(given) if runs is not None else runs_there(model, given):
                return given
    if first is None:
        raise ModelError(
            f"No inputs can be made for {type(inner_model(model)).__name__} from its forward's signature.",
            "Pass a batch of your own.",
        )
    return first


def runs_there(model: nn.Module, given: dict[str, Any], run: Runner | None = None) -> bool:
    """Whether a forward with these arguments runs on the device of `model`."""
    return any(_error_of(model, Call("", form), run, model.training) is None for form in _forms(given, *_place(model)))


def masked(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """`inputs` with a mask of ones for token ids that come without one, where the forward takes one: without a mask
    transformers reads the positions to look for packed sequences."""
    names = forward_parameters(model)
    given = {mask: inputs[ids] for mask, ids in MASKS.items() if ids in inputs and mask in names}
    # Ids of several codebooks have one dimension more than the mask.
    masks = {mask: torch.ones_like(ids[..., 0] if ids.dim() > 2 else ids) for mask, ids in given.items()}
    return {**masks, **inputs}


def runnable_calls(
    model: nn.Module,
    inputs: Mapping[str, Any] | None = None,
    *,
    variants: Sequence[Variant] = VARIANTS,
    seed: int = 0,
    run: Runner | None = None,
) -> Calls:
    """For each variant and modality, the first call that runs in eval and in train mode; `errors` has the failed calls.

    Inputs are on the model's device, in its floating dtype. `inputs`, if given, are the only call that is tried. Where
    no call runs in both modes, a call that runs in the model's own mode is taken. The model is left as it was: mode,
    buffers, and torch's global CPU generator.
    """
    if inputs is not None:
        return first_to_run(model, [Call("inputs", form) for form in _forms(dict(inputs), _place(model)[0])], run)
    inner = inner_model(model)
    if isinstance(getattr(inner, "config", None), PreTrainedConfig):
        calls = first_to_run(model, proposed(model, variants, seed), run)
        if calls or isinstance(inner, PreTrainedModel):
            return calls  # else it is a wrapper with the config of the model inside
    return _without_config(model, variants, seed, run)


def _without_config(model: nn.Module, variants: Sequence[str], seed: int, run: Runner | None) -> Calls:
    """Calls of a model without a transformers config; a variant has one more call with targets, if there are any."""
    device, dtype = _place(model)

    def attempt(given: dict[str, Any]) -> None:
        *others, last = _forms(given, device, dtype)
        for form in others:
            if _error_of(model, Call("", form), None, model.training) is None:
                return
        run_once(model, Call("", last))

    tried = (
        Call(f"{variant} {name}".rstrip(), form)
        for variant in variants
        for name, kwargs in foreign(inner_model(model), variant, seed, attempt)
        for form in _forms(kwargs, device, dtype)
    )
    calls = first_to_run(model, tried, run)
    if not calls and not calls.errors:
        why = "has no transformers config, and its inputs cannot be guessed: pass inputs"
        return Calls(errors=[("inputs", f"{type(inner_model(model)).__name__} {why}")])
    # Notes show the last error, so the likeliest inputs come last.
    return Calls(calls, [(label, f"with guessed inputs: {error}") for label, error in reversed(calls.errors)])


def first_to_run(model: nn.Module, tried: Iterable[Call], run: Runner | None = None) -> Calls:
    """For each label the first of its calls, which are alternatives, that runs in both modes, or else in the mode that
    the model is in."""
    by_label: dict[str, list[Call]] = {}
    for call in tried:
        by_label.setdefault(call.label, []).append(call)
    calls: list[Call] = []
    errors: dict[tuple[str, str], None] = {}
    for alternatives in by_label.values():
        fallback: Call | None = None
        for call in alternatives:
            here = _error_of(model, call, run, model.training)
            there = _error_of(model, call, run, not model.training) if here is None else None
            if here is None and there is None:
                calls.append(call)
                break
            errors.setdefault((call.name, here or f"in the other mode: {there}"))
            if here is None and fallback is None:
                fallback = call
        else:
            if fallback is not None:
                calls.append(fallback)
    return Calls(calls, [*errors])


def training_targets(model: nn.Module, inputs: Mapping[str, Any], *, run: Runner | None = None) -> dict[str, Any]:
    """Arguments with which the forward returns a loss for `inputs`, mostly ``labels``; ``{}`` where none are found. The
    shape of the logits decides: a class for each token, row or pixel, or a number for each row of one logit. Losses
    that read the lengths of sounds from a mask (Parakeet's CTC) get one of ones."""
    config, names = getattr(inner_model(model), "config", None), forward_parameters(model)
    problem_type = getattr(config, "problem_type", None)
    try:
        logits = getattr(run_once(model, Call("", dict(inputs)), run), "logits", None)
        for masks in ({}, *_masks_of_sounds(names, inputs)):
            for targets in _target_candidates(names, logits, inputs):
                if _gives_loss(model, {**inputs, **masks, **targets}, run):
                    return {**masks, **targets}
    except Exception:  # the model does not run; runnable_calls says why
        return {}
    finally:
        # Classification heads derive the problem type from the labels and write it into their config.
        if config is not None and hasattr(config, "problem_type"):
            config.problem_type = problem_type
    return {}


def _masks_of_sounds(names: Collection[str], inputs: Mapping[str, Any]) -> Iterator[dict[str, torch.Tensor]]:
    sound = next((inputs[name] for name in ("input_features", "input_values") if name in inputs), None)
    if "attention_mask" in names and "attention_mask" not in inputs and isinstance(sound, torch.Tensor):
        yield {"attention_mask": torch.ones(sound.shape[:2], dtype=torch.long, device=sound.device)}


def _target_candidates(names: Collection[str], logits: Any, inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Arguments with which a forward with parameters `names` may return a loss, the likeliest first."""
    generator = torch.Generator().manual_seed(0)
    if "labels" in names:
        for labels in _labels(logits, inputs, generator):
            yield {"labels": labels}
    rows = next((value.shape[0] for value in inputs.values() if isinstance(value, torch.Tensor)), 0)
    device = next((value.device for value in inputs.values() if isinstance(value, torch.Tensor)), None)
    ones = torch.ones(rows, dtype=torch.long, device=device)
    if {"start_positions", "end_positions"} <= set(names):
        yield {"start_positions": ones, "end_positions": 2 * ones}
    if {"labels", "next_sentence_label"} <= set(names) and isinstance(ids := inputs.get("input_ids"), torch.Tensor):
        yield {"labels": ids.clone(), "next_sentence_label": ones}
    if "return_loss" in names:
        yield {"return_loss": True}


def _labels(logits: Any, inputs: Mapping[str, Any], generator: torch.Generator) -> Iterator[torch.Tensor]:
    if not isinstance(logits, torch.Tensor) or logits.dim() < 2:
        return

    def classes(shape: Sequence[int], count: int) -> torch.Tensor:
        # Of many classes the first few are often padding or blank.
        first = 4 if count > 8 else 0
        return torch.randint(first, max(1, count), tuple(shape), generator=generator).to(logits.device)

    batch, count = logits.shape[0], logits.shape[-1]
    if logits.dim() == 2:
        yield torch.randn(batch, generator=generator).to(logits) if count == 1 else classes((batch,), count)
    elif logits.dim() == 3:
        # A label for each position of the logits, else for each id, else a short transcript.
        yield _unpadded(classes(logits.shape[:2], count), inputs)
        if isinstance(ids := inputs.get("input_ids"), torch.Tensor):
            yield classes(ids.shape, count)
        yield classes((batch, max(1, logits.shape[1] // 4)), count)
    elif isinstance(pixels := inputs.get("pixel_values"), torch.Tensor):
        yield classes((batch, *pixels.shape[-2:]), logits.shape[1])


def _unpadded(labels: torch.Tensor, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Labels with padding ignored, as a collator returns them."""
    name = "decoder_attention_mask" if "decoder_input_ids" in inputs else "attention_mask"
    mask = inputs.get(name)
    if isinstance(mask, torch.Tensor) and mask.shape == labels.shape:
        return labels.masked_fill(mask == 0, IGNORED)
    return labels


def proposed(
    model: nn.Module, variants: Sequence[str], seed: int, *, part: str = "", method: str = ""
) -> Iterator[Call]:
    """Calls to try, the likeliest first; a variant with the inputs of ``plain`` is left out. With `part` or `method`,
    the calls are of that submodule or method of `model`."""
    module = model.get_submodule(part)
    device, dtype = _place(module)
    target = Call("", {}, part, method).target
    prefix = f"{target}: " if target else ""
    plain: dict[str, dict[str, Any]] = {}
    for variant in variants:
        for name, kwargs in candidates(module, variant, seed, method):
            modality, _, detail = name.partition(":")
            if variant == "plain":
                plain[name] = kwargs
            elif name in plain and _same_shapes(plain[name], kwargs):
                continue
            label = prefix + (variant if modality == "main" else f"{variant} {modality}")
            for form in _forms(kwargs, device, dtype):
                yield Call(label, form, part, method, detail)


def _forms(kwargs: dict[str, Any], device: torch.device, dtype: torch.dtype | None = None) -> Iterator[dict[str, Any]]:
    """`kwargs` on `device`; for meta, then also with integers on the CPU: some forwards read sizes, ids or masks."""
    yield placed(kwargs, device, dtype)
    if device.type == "meta" and (integers := {name: value for name, value in kwargs.items() if _is_integral(value)}):
        yield {**placed(kwargs, device, dtype), **integers}


def _is_integral(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not (value.is_meta or value.is_floating_point() or value.is_complex())


def _same_shapes(one: dict[str, Any], other: dict[str, Any]) -> bool:
    def shape(value: Any) -> Any:
        return value.shape if isinstance(value, torch.Tensor) else value

    masked = any(name.endswith("mask") and not bool(value.all()) for name, value in other.items())
    return not masked and {k: shape(v) for k, v in one.items()} == {k: shape(v) for k, v in other.items()}


def _place(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    parameters = list(model.parameters())
    device = parameters[0].device if parameters else torch.device("cpu")
    floating = (parameter.dtype for parameter in parameters if parameter.is_floating_point())
    return device, next(floating, torch.float32)


def _error_of(model: nn.Module, call: Call, run: Runner | None, training: bool) -> str | None:
    try:
        run_once(model, call, run, training)
    except Exception as error:  # any failure means that these inputs do not fit
        return f"{type(error).__name__}: {one_line(error)}"
    return None


def run_once(model: nn.Module, call: Call, run: Runner | None = None, training: bool | None = None) -> Any:
    """Output of `call` without gradients, in the given mode, executed by `run` (default: `unobserved`); the model is
    left as it was."""
    own = call.copied()
    has_values = any(_is_integral(value) for value in own.kwargs.values())
    with preserved(model), torch.no_grad(), MetaReads(keeps_values=has_values):
        if training is not None and training != model.training:
            model.train(training)
        return (run or unobserved)(model, own)


def unobserved(model: nn.Module, call: Call) -> Any:
    """Run `call`, an fp64 model in fp64 throughout (`memopt.walk.aten.precision.precise`)."""
    with precise(_place(model)[1]):
        return call.run(model)


def _gives_loss(model: nn.Module, kwargs: dict[str, Any], run: Runner | None) -> bool:
    try:
        loss = getattr(run_once(model, Call("", kwargs), run), "loss", None)
    except Exception:
        return False
    return isinstance(loss, torch.Tensor) and loss.numel() == 1 and (loss.is_meta or bool(loss.isfinite()))
