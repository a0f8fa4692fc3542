"""One training step of a model on a probe batch; every model of a verification runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memopt.verification.inputs import Probes
from memopt.verification.models import cast_inputs, floating_outputs

Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Step:
    """The results of one forward and backward."""

    loss: float
    outputs: dict[str, Tensor]
    """Field -> floating-point tensor, the loss not included."""
    gradients: Gradients
    """Parameter -> gradient, for the parameters that have one."""
    read: frozenset[str]
    """Names of the outputs that are part of the autograd graph."""


def training_step(model: nn.Module, probes: Probes, dtype: torch.dtype) -> Step:
    """Forward and backward on the first probe; `model` is in eval mode, so no dropout runs."""
    model.zero_grad()
    output = model(**cast_inputs({**probes.batches[0], **probes.targets[0]}, dtype))
    loss = loss_of(output)
    loss.backward()
    gradients = {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None}
    outputs = floating_outputs(output)
    read = frozenset(name for name, tensor in outputs.items() if tensor.requires_grad)
    return Step(float(loss.detach()), {name: each.detach() for name, each in outputs.items()}, gradients, read)


def training_loss(model: Callable[..., Any], inputs: dict[str, Any]) -> Tensor:
    """The loss of one forward."""
    return loss_of(model(**inputs))


def loss_of(output: Any) -> Tensor:
    """The model's own loss if it has one; else a fixed random projection of its floating-point outputs."""
    loss: Tensor | None = output.get("loss") if isinstance(output, dict) else None
    if loss is not None:
        return loss
    generator = torch.Generator().manual_seed(0)
    parts = []
    for tensor in floating_outputs(output).values():
        if tensor.requires_grad:
            weights = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.device)
            wide = tensor if tensor.dtype == torch.float64 else tensor.float()
            parts.append((wide * weights.to(wide.dtype)).mean())
    return torch.stack(parts).sum()
