"""The cost of sampling: the expected error of weights' gradients, predicted on a probe batch, and an exact alternative.

The formulas of the samplers predict the error of each weight's gradient.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from memopt.errors import MemoptError
from memopt.kernels.sampled_linear.sampling import expected_error, rows_kept
from memopt.patches.base import RecipeView
from memopt.patches.capabilities import Trial
from memopt.patches.sampled_linear.module import sampling_of
from memopt.patches.sampled_linear.rules import SampledLinearRules
from memopt.patches.sampled_linear.slot import Sampling

#: Copies of the weights in fp32 that a step needs: weights, gradients, and tensors for the comparison.
_COPIES = 4


def predicted_errors(trial: Trial) -> SamplingErrors:
    """The error of each sampled weight's gradient, if the trial's source is a local folder with weights."""
    recipe, rules, folder = trial.recipe, trial.recipe.rules(SampledLinearRules), Path(trial.source)
    if not folder.is_dir() or not any(True for ending in ("safetensors", "bin") for _ in folder.glob(f"*.{ending}")):
        return not_measured(recipe, "the weights are not in a local folder")
    try:
        model = trial.stock()
        needed = sum(p.numel() for p in model.parameters()) * torch.float32.itemsize * _COPIES
        if needed >= psutil.virtual_memory().available:
            return not_measured(recipe, "a training step in fp32 does not fit into memory here")
        model = nn.Module.float(model)
        plan = trial.plan(model)
        names = dict.fromkeys(site.module for site in plan.chosen("linear", "sample"))
        with errors_found(model, dict.fromkeys(names, sampling_of(rules))) as errors:
            trial.step(model)
    except MemoptError as error:
        return not_measured(recipe, str(error).splitlines()[0].rstrip("."))
    refused = tuple((entry.site, entry.reason) for entry in plan.refusals if entry.kind == "linear")
    return SamplingErrors(rules.method, rules.budget, trial.probe, tuple(errors), refused)


def not_measured(recipe: RecipeView, why: str) -> SamplingErrors:
    """A result without errors, for a recipe that could not be measured, with the reason `why`."""
    rules = recipe.rules(SampledLinearRules)
    return SamplingErrors(rules.method, rules.budget, probe="", why_not=why)


@contextlib.contextmanager
def errors_found(model: nn.Module, samplings: Mapping[str, Sampling]) -> Iterator[list[LinearError]]:
    """A list that is filled at exit with the error that sampling would make at each linear of `samplings`. If a module
    runs more than once, its last backward counts."""
    found: dict[str, LinearError] = {}

    def ran(name: str, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if output.requires_grad and args:
            output.register_hook(functools.partial(differentiated, name, args[0].detach()))

    def differentiated(name: str, x: Tensor, dy: Tensor) -> None:
        rows, gradients = x.reshape(-1, x.shape[-1]), dy.detach().reshape(-1, dy.shape[-1])
        sampling, norms = samplings[name], torch.linalg.vector_norm(rows, dim=1)
        budget = rows_kept(len(rows), sampling.budget)
        best = norms * torch.linalg.vector_norm(gradients, dim=1)
        error = functools.partial(expected_error, rows, gradients, k=budget, method=sampling.method)
        size = float((gradients.t() @ rows).norm())
        found[name] = LinearError(name, error(scores=norms), error(scores=best), size)

    errors: list[LinearError] = []
    with contextlib.ExitStack() as hooks:
        for name in samplings:
            hooks.enter_context(model.get_submodule(name).register_forward_hook(functools.partial(ran, name)))
        yield errors
    errors += [found[name] for name in samplings if name in found]


@dataclass(frozen=True)
class LinearError:
    """Expected relative root mean square error of the gradient of one linear's weight."""

    module: str
    first: float
    """Error if rows are drawn by the norms of the input alone, as on a sample's first visit."""
    known: float
    """Error if rows are drawn by the norms of input and output gradient: the least with remembered gradients."""
    gradient: float
    """Norm of the exact gradient."""


@dataclass(frozen=True)
class SamplingErrors:
    """The sampled linears of one model on one batch."""

    method: str
    budget: float
    probe: str
    """Description of the batch."""
    linears: tuple[LinearError, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    """(weight, reason) of linears that keep their whole input."""
    why_not: str = ""
    """Why nothing was measured; empty if it was."""
    key: str = "sampling"
    """Name of this section in the report's JSON document."""

    def together(self, *, known: bool = False) -> float:
        """The relative error of all sampled weights together: errors of independent draws add in squares."""
        size = sum(linear.gradient**2 for linear in self.linears)
        errors = (((linear.known if known else linear.first) * linear.gradient) ** 2 for linear in self.linears)
        return math.sqrt(sum(errors) / size) if size else 0.0

    def lines(self) -> Iterator[str]:
        """The result in sentences."""
        budget = f"{self.budget:.0%}"
        yield f"Sampled linears: {self.method}, {budget} of the rows; forward and input gradients stay exact."
        if not self.linears and not self.why_not:
            yield "  No linear of this model is sampled."
        elif self.why_not:
            yield f"  Expected error of dW: not measured, because {self.why_not}."
        else:
            yield f"  Expected relative RMSE of dW on the probe batch ({self.probe}):"
            for name, group in _alike(self.linears):
                known = _spread([each.known for each in group])
                yield f"    {name}: {_spread([each.first for each in group])}; {known} at best"
            yield f"    all sampled weights: {self.together():.2f}; {self.together(known=True):.2f} at best"
            yield "  (first visit of a sample; at best, where the gradients of its last visit are remembered)"
        if self.refused:
            yield "  Kept whole:"
            yield from _refusals(self.refused)
        yield f"  Exact alternative: {accumulation(self.budget)}."

    def to_dict(self) -> dict[str, Any]:
        """This section of the report's JSON document."""
        return {
            "method": self.method,
            "budget": self.budget,
            "probe": self.probe,
            "not_measured": self.why_not or None,
            "relative_rmse": self.together() if self.linears else None,
            "relative_rmse_at_best": self.together(known=True) if self.linears else None,
            "linears": [
                {"module": each.module, "relative_rmse": each.first, "relative_rmse_at_best": each.known}
                for each in self.linears
            ],
            "refused": [{"weight": weight, "reason": reason} for weight, reason in self.refused],
            "exact_alternative": accumulation(self.budget),
        }


def accumulation(budget: float) -> str:
    """The exact alternative, in words: gradient accumulation that keeps as few rows, without any error."""
    steps = math.ceil(1 / budget - 1e-9)
    return f"micro-batches of 1/{steps} of the batch, accumulated over {steps} passes: no more rows are kept, no error"


def _refusals(refused: Sequence[tuple[str, str]]) -> Iterator[str]:
    """A line for each reason, with the names of its linears; linears of different layers share a name."""
    reasons: dict[str, str] = {}
    for weight, reason in refused:
        reasons.setdefault(_any_layer(weight.rpartition(".")[0]).rpartition("#.")[2], reason)
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    for reason, alike in names.items():
        yield f"    {', '.join(alike)}: {reason}"


def _alike(linears: Sequence[LinearError]) -> list[tuple[str, list[LinearError]]]:
    groups: dict[str, list[LinearError]] = {}
    for linear in linears:
        groups.setdefault(_any_layer(linear.module), []).append(linear)
    return list(groups.items())


def _any_layer(name: str) -> str:
    return ".".join("#" if part.isdigit() else part for part in name.split("."))


def _spread(values: Sequence[float]) -> str:
    low, high, middle = min(values), max(values), sorted(values)[len(values) // 2]
    return f"{middle:.2f}" if len(values) == 1 else f"{middle:.2f} ({low:.2f} to {high:.2f})"
