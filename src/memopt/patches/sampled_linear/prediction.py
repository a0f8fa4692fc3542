"""The error of each sampled weight's gradient that a probe batch predicts, by the samplers' formulas."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn

from memopt.errors import MemoptError
from memopt.kernels.sampled_linear.sampling import expected_error, rows_kept
from memopt.patches.base import RecipeView
from memopt.patches.capabilities import Trial
from memopt.patches.sampled_linear.module import sampling_of
from memopt.patches.sampled_linear.noise import LinearError, SamplingErrors
from memopt.patches.sampled_linear.rules import SampledLinearRules
from memopt.patches.sampled_linear.slot import Sampling

#: Copies of the weights in fp32: themselves, their gradients, what is compared.
_COPIES = 4


def predicted_errors(trial: Trial) -> SamplingErrors:
    """The error of each sampled weight's gradient, if the trial's source is a local folder with weights."""
    recipe, rules = trial.recipe, trial.recipe.rules(SampledLinearRules)
    if not _has_weights(Path(trial.source)):
        return not_measured(recipe, "the weights are not in a local folder")
    try:
        model = trial.stock()
        if not _fits(model):
            return not_measured(recipe, "a training step in fp32 does not fit into memory here")
        model = nn.Module.float(model)
        plan = trial.plan(model)
        names = dict.fromkeys(site.module for site in plan.chosen("linear", "sample"))
        with Captured(model, dict.fromkeys(names, sampling_of(rules))) as captured:
            trial.step(model)
    except MemoptError as error:
        return not_measured(recipe, str(error).splitlines()[0].rstrip("."))
    refused = tuple((entry.site, entry.reason) for entry in plan.refusals if entry.kind == "linear")
    return SamplingErrors(rules.method, rules.budget, trial.probe, tuple(captured.errors), refused)


def not_measured(recipe: RecipeView, why: str) -> SamplingErrors:
    """What there is to say where nothing could be measured."""
    rules = recipe.rules(SampledLinearRules)
    return SamplingErrors(rules.method, rules.budget, probe="", why_not=why)


def _has_weights(folder: Path) -> bool:
    return folder.is_dir() and any(True for pattern in ("*.safetensors", "*.bin") for _ in folder.glob(pattern))


def _fits(model: nn.Module) -> bool:
    needed = sum(p.numel() for p in model.parameters()) * torch.float32.itemsize * _COPIES
    return bool(needed < psutil.virtual_memory().available)


class Captured:
    """Inside, every linear of `samplings` tells the error that sampling its input would make, once backward is through.

    A module that runs more than once counts with its last call.
    """

    def __init__(self, model: nn.Module, samplings: Mapping[str, Sampling]) -> None:
        self._modules = {name: model.get_submodule(name) for name in samplings}
        self._samplings = samplings
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._errors: dict[str, LinearError] = {}

    @property
    def errors(self) -> list[LinearError]:
        return [self._errors[name] for name in self._modules if name in self._errors]

    def __enter__(self) -> Captured:
        for name, module in self._modules.items():
            self._handles.append(module.register_forward_hook(functools.partial(self._ran, name)))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _ran(self, name: str, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if output.requires_grad and args:
            x = args[0].detach()
            output.register_hook(functools.partial(self._differentiated, name, x))

    def _differentiated(self, name: str, x: Tensor, dy: Tensor) -> None:
        rows, gradients = x.reshape(-1, x.shape[-1]), dy.detach().reshape(-1, dy.shape[-1])
        sampling, norms = self._samplings[name], torch.linalg.vector_norm(rows, dim=1)
        budget = rows_kept(len(rows), sampling.budget)
        best = norms * torch.linalg.vector_norm(gradients, dim=1)
        error = functools.partial(expected_error, rows, gradients, k=budget, method=sampling.method)
        size = float((gradients.t() @ rows).norm())
        self._errors[name] = LinearError(name, error(scores=norms), error(scores=best), size)
