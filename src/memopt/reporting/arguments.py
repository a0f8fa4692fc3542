"""The arguments of a training forward of any size: inputs, masks and labels, on fake tensors or real ones."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from memopt.reporting.emulate import CudaChoices
from memopt.reporting.training import Precision, Training
from memopt.torch_compat import FakeTensor, know_values, no_dispatch, tree_map, unset_fake_temporarily
from memopt.walk.calls.arguments.request import BATCH, LENGTH, forward_parameters
from memopt.walk.calls.batch import Batch
from memopt.walk.calls.inputs import Call, dummy_inputs, training_targets
from memopt.walk.models.alike import take_out
from memopt.walk.models.build import build_meta
from memopt.walk.sites import Sites

#: Precision -> (dtype of the weights, dtype of autocast or None).
DTYPES: dict[Precision, tuple[torch.dtype, torch.dtype | None]] = {
    "fp32": (torch.float32, None),
    "bf16": (torch.bfloat16, None),
    "fp16": (torch.float16, None),
    "bf16-mixed": (torch.float32, torch.bfloat16),
    "fp16-mixed": (torch.float32, torch.float16),
}


def step_arguments(
    model: PreTrainedModel,
    training: Training,
    batch: Batch | None = None,
    *,
    real: bool = False,
    targets: Mapping[str, Tensor] = MappingProxyType({}),
) -> dict[str, Any]:
    """Keyword arguments of one training forward of the given size, with labels where the model takes them.

    Args:
        real: `model` has values; by default it is on fake tensors, and a fake mode is active.
        targets: labels of that size on the meta device, where they are known.
    """
    if batch is None:
        inputs = _inputs(model, training)
    else:
        dtype = DTYPES[training.precision][0]
        inputs = {name: tree_map(lambda leaf: _traced(leaf, dtype), value) for name, value in batch.items()}
    _with_mask(model, inputs)
    labels: Mapping[str, Any] = {name: torch.zeros(each.shape, dtype=each.dtype) for name, each in targets.items()}
    if not labels and "labels" not in inputs:
        labels = training_targets(model, inputs, run=None if real else _run_without_values)
    return {**{name: _counted(label) for name, label in labels.items()}, **inputs}


def known_targets(config: PreTrainedConfig, sites: Sites, training: Training) -> Mapping[str, Tensor]:
    """The labels of one training forward, by a run of a few blocks on the meta device, which is fast.

    Empty where the model takes none, and where it does not run there.
    """
    return _targets(_Model(config, sites), Training(training.batch, training.seq, training.precision))


def group_experts(model: PreTrainedModel) -> None:
    """Run experts as transformers trains them; the batched form of `build_meta` saves copies of weights per token."""
    with contextlib.suppress(ValueError, AttributeError):  # no experts, or no choice of how they run
        model.set_experts_implementation("grouped_mm")


@dataclass(frozen=True, eq=False)
class _Model:
    """Equal to another of the same two objects."""

    config: PreTrainedConfig
    sites: Sites

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Model) and self.config is other.config and self.sites is other.sites

    def __hash__(self) -> int:
        return hash((id(self.config), id(self.sites)))


@lru_cache(maxsize=8)
def _targets(of: _Model, size: Training) -> Mapping[str, Tensor]:
    with unset_fake_temporarily(), torch.device("meta"):
        model = build_meta(of.config, dtype=DTYPES[size.precision][0])
        group_experts(model)
        take_out(model, of.sites.blocks, groups=1)
        inputs = _with_mask(model, _inputs(model, size, device="meta"))
        return MappingProxyType(training_targets(model, inputs, run=_run_without_values))


def _with_mask(model: PreTrainedModel, inputs: dict[str, Any]) -> dict[str, Any]:
    for ids, mask in (("input_ids", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask")):
        if ids in inputs and mask in forward_parameters(model):
            # Without a mask transformers reads the positions to look for packed sequences.
            inputs.setdefault(mask, _with_values(torch.ones_like(inputs[ids]), 1))
    return inputs


def _inputs(model: PreTrainedModel, training: Training, device: str = "cpu") -> dict[str, Any]:
    small = dummy_inputs(model, device=device, dtype=DTYPES[training.precision][0])
    return {name: _grown(value, training) if isinstance(value, Tensor) else value for name, value in small.items()}


def _counted(target: Any) -> Any:
    """Labels of which none is ignored; how many rows of a loss count decides what it allocates."""
    if not isinstance(target, Tensor) or target.is_floating_point():
        return target
    return _with_values(torch.zeros_like(target), 0)


def _with_values(tensor: Tensor, value: int) -> Tensor:
    if isinstance(tensor, FakeTensor):
        with no_dispatch():
            know_values(tensor, torch.full(tensor.shape, value, dtype=tensor.dtype))
    return tensor


def _traced(leaf: Any, dtype: torch.dtype) -> Any:
    """A tensor to trace with; integers, which a forward may read, keep their values where they have some."""
    if not isinstance(leaf, Tensor) or not (leaf.is_meta or leaf.is_floating_point()):
        return leaf
    values = torch.zeros(leaf.shape, dtype=dtype)  # fake, and so are integers cast from it
    return values if leaf.is_floating_point() else values.to(leaf.dtype)


def _grown(tensor: Tensor, training: Training) -> Tensor:
    batch, *rest = tensor.shape
    shape = [
        training.batch if batch == BATCH else batch,
        *(training.seq if n == LENGTH and training.seq else n for n in rest),
    ]
    return torch.zeros(shape, dtype=tensor.dtype)


def _run_without_values(model: nn.Module, call: Call) -> Any:
    """The outputs by which labels are chosen. The loss goes to meta, since a fake one cannot be tested for NaN."""
    with CudaChoices():
        output = call.run(model)
    loss = getattr(output, "loss", None)
    return SimpleNamespace(logits=getattr(output, "logits", None), loss=None if loss is None else loss.to("meta"))
