"""The checkpoint on which patches measure (`memopt.patches.capabilities.Trial`), and their sections of a report.

Also the training step on a probe batch that every model of a verification runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from memopt.api import plan_for
from memopt.environment.files import user_path
from memopt.environment.generators import seed_all
from memopt.patches.capabilities import Checks, Reports, Section
from memopt.patches.registry import having
from memopt.plan.plan import Plan
from memopt.plan.recipe import Recipe
from memopt.prediction.subject import chosen_recipe
from memopt.trace.training import Request
from memopt.verification.inputs import Probes, probe_inputs
from memopt.verification.models import (
    Reference,
    cast_inputs,
    floating_outputs,
    load_patched,
    load_stock,
    reference_for,
    stored_dtype,
)
from memopt.walk.calls.batch import Batch, given_batch

#: All models run in fp32, whose rounding (1e-6 of a gradient) is far below the error of any approximation.
DTYPE = torch.float32
Gradients = dict[str, Tensor]
T = TypeVar("T")


@dataclass(frozen=True)
class StoredRun(Generic[T]):
    """The result of a run in the stored dtype, and the probes and dtypes of all runs."""

    result: T
    dtype: torch.dtype
    reference: Reference
    probes: Probes


@dataclass
class CheckpointTrial:
    """Loads the models of one folder, and runs training steps of them on one probe batch."""

    source: Path
    recipe: Recipe
    trust_remote_code: bool = False
    inputs: Batch | None = None
    """The user's batch; None to make inputs."""
    folded: frozenset[str] = frozenset()
    """Names of the norms that are folded."""
    draws: bool = field(default=False, init=False)
    """Whether the last step drew random numbers."""
    _probes: Probes | None = field(default=None, init=False)

    @property
    def probe(self) -> str:
        """Description of the batch; empty before the first step."""
        return "" if self._probes is None else self._probes.source

    @property
    def exact(self) -> tuple[str, ...]:
        """The settings that switch off sampling and approximation."""
        return self.recipe.without("sampled", "approximate")

    def stock(self, dtype: torch.dtype | None = None) -> nn.Module:
        return load_stock(self.source, dtype=dtype, trust_remote_code=self.trust_remote_code)

    def patched(self, *settings: str, dtype: torch.dtype | None = DTYPE) -> nn.Module:
        """The patched model, under its recipe with these settings (KEY=VALUE) changed."""
        code = self.trust_remote_code
        few = [setting for patch in having(Checks) for setting in patch.on_few_tokens(self.recipe)]
        given = (*few, *settings)
        return load_patched(self.source, trust_remote_code=code, inputs=self.inputs, dtype=dtype, overrides=given)

    def probes(self, model: nn.Module) -> Probes:
        """The inputs of all models of the folder."""
        return probe_inputs(model, self.source, self.inputs, trust_remote_code=self.trust_remote_code)

    def stored_run(
        self, run: Callable[[nn.Module, Probes, torch.dtype], T], copies: int, model: nn.Module
    ) -> StoredRun[T] | None:
        """`run` on `model` in the stored dtype; None if no more precise run fits into memory (`reference_for`)."""
        dtype, reference = stored_dtype(model), reference_for(model, copies=copies)
        if reference is None:
            return None
        probes = self.probes(model)
        return StoredRun(run(model, probes, dtype), dtype, reference, probes)

    def plan(self, model: nn.Module) -> Plan:
        return plan_for(model, self.recipe, inputs=self.inputs)

    def step(self, model: nn.Module) -> tuple[float, Gradients]:
        """Loss and gradients of the probe batch, in fp32 and eval mode; each sampled step draws other rows."""
        if self._probes is None:
            self._probes = self.probes(model)
        before = torch.default_generator.get_state()
        step = _step(model, self._probes, DTYPE)
        self.draws = not torch.equal(before, torch.default_generator.get_state())
        return step.loss, step.gradients


def report_sections(request: Request, note: Callable[[str], None] | None = None) -> tuple[Section, ...]:
    """The sections that patches add to a report; only a local folder has weights to measure with.
    `note` is called with a sentence before a step that takes long."""
    folder, inputs = user_path(request.model), given_batch(request.inputs)
    trial = CheckpointTrial(folder, chosen_recipe(request), request.trust_remote_code, inputs)
    trains_all, tell = request.train == "full", note or (lambda text: None)
    sections = (patch.report(trial, trains_all=trains_all, note=tell) for patch in having(Reports))
    return tuple(section for section in sections if section is not None)


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
    """Forward and backward on the first probe; `model` is in eval mode, so no dropout runs. A forward that draws random
    numbers (the mask of ViT-MAE) draws the same ones in every step."""
    seed_all(0)
    return _step(model, probes, dtype)


def _step(model: nn.Module, probes: Probes, dtype: torch.dtype) -> Step:
    model.zero_grad()
    output = model(**cast_inputs({**probes.batches[0], **probes.targets[0]}, dtype))
    loss = loss_of(output)
    loss.backward()
    gradients = {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None}
    outputs = floating_outputs(output)
    read = frozenset(name for name, tensor in outputs.items() if tensor.requires_grad)
    return Step(float(loss.detach()), {name: each.detach() for name, each in outputs.items()}, gradients, read)


def loss_of(output: Any) -> Tensor:
    """The model's own loss if it has one; else a fixed random projection of its floating-point outputs."""
    loss: Tensor | None = output.get("loss") if isinstance(output, dict) else None
    if loss is not None:
        return loss
    generator = torch.Generator().manual_seed(0)
    parts = []
    for tensor in floating_outputs(output).values():
        if tensor.requires_grad and tensor.numel():  # the mean of no element is NaN
            weights = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.device)
            wide = tensor if tensor.dtype == torch.float64 else tensor.float()
            parts.append((wide * weights.to(wide.dtype)).mean())
    return torch.stack(parts).sum()
