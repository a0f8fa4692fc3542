"""The checkpoint on which patches measure (`memopt.patches.capabilities.Trial`), and their sections of a report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from memopt.api import plan_for
from memopt.environment.files import user_path
from memopt.patches.capabilities import Checks, Reports, Section
from memopt.patches.registry import having
from memopt.plan.plan import Plan
from memopt.plan.recipe import Recipe
from memopt.trace.subject import chosen_recipe
from memopt.trace.training import Request
from memopt.verification.inputs import Probes, probe_inputs
from memopt.verification.models import load_patched, load_stock
from memopt.verification.step import Gradients, training_step
from memopt.walk.calls.batch import Batch, given_batch

#: All models run in fp32, whose rounding (1e-6 of a gradient) is far below the error of any approximation.
DTYPE = torch.float32


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
    _probes: Probes | None = field(default=None, init=False)

    @property
    def probe(self) -> str:
        return "" if self._probes is None else self._probes.source

    @property
    def exact(self) -> tuple[str, ...]:
        """The settings that switch off sampling and approximation."""
        return self.recipe.without("sampled", "approximate")

    def stock(self, dtype: torch.dtype | None = None) -> nn.Module:
        return load_stock(self.source, dtype=dtype, trust_remote_code=self.trust_remote_code)

    def patched(self, *settings: str, dtype: torch.dtype | None = DTYPE) -> nn.Module:
        code = self.trust_remote_code
        few = [setting for patch in having(Checks) for setting in patch.on_few_tokens(self.recipe)]
        given = (*few, *settings)
        return load_patched(self.source, trust_remote_code=code, inputs=self.inputs, dtype=dtype, overrides=given)

    def probes(self, model: nn.Module) -> Probes:
        """The inputs of all models of the folder."""
        return probe_inputs(model, self.source, self.inputs, trust_remote_code=self.trust_remote_code)

    def plan(self, model: nn.Module) -> Plan:
        return plan_for(model, self.recipe, inputs=self.inputs)

    def step(self, model: nn.Module) -> tuple[float, Gradients]:
        if self._probes is None:
            self._probes = self.probes(model)
        step = training_step(model, self._probes, DTYPE)
        return step.loss, step.gradients


def report_sections(request: Request, note: Callable[[str], None] | None = None) -> tuple[Section, ...]:
    """The sections that patches add to a report; only a local folder has weights to measure with.

    Args:
        request: the model, the recipe and the training of the report.
        note: called with a sentence before a step that takes long.
    """
    folder, inputs = user_path(request.model), given_batch(request.inputs)
    trial = CheckpointTrial(folder, chosen_recipe(request), request.trust_remote_code, inputs)
    trains_all, tell = request.train == "full", note or (lambda text: None)
    sections = (patch.report(trial, trains_all=trains_all, note=tell) for patch in having(Reports))
    return tuple(section for section in sections if section is not None)
