"""Sampled linears on a model's own weights: the error that a probe batch predicts, and the proof that it is only noise.

The forward, and every gradient but those of sampled weights, are exact. Of those the mean over draws has to be the
exact gradient, within three standard errors, and a single draw as far off as the sampler's formula says.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn

from memopt.errors import MemoptError
from memopt.kernels.sampled_linear.sampling import expected_error, rows_kept
from memopt.patches.sampled_linear.module import SampledLinearRewrite
from memopt.patches.swap import is_swapped, swap_state
from memopt.plan.recipe import Recipe
from memopt.report.sampling import LinearError, SamplingErrors
from memopt.saved.sampled import Sampling
from memopt.verify.gradient import Gradients, training_gradients
from memopt.verify.inputs import probe_inputs
from memopt.verify.models import NOTHING_SAMPLED, free_memory, load_patched, load_stock
from memopt.verify.verdict import Check, Status
from memopt.walk.calls.batch import Batch

#: Draws whose mean is compared, and how many standard errors it may be off.
DRAWS, STANDARD_ERRORS = 32, 3.0
_DTYPE = torch.float32
#: Copies of the weights in fp32: themselves, their gradients, what is compared.
_COPIES = 4
#: Relative difference of gradients that are the same sums: fp32 rounding, through all layers.
_ROUNDING = 1e-4
#: How much more than predicted the draws may scatter: a sum over many weights of few draws each.
_SCATTER = 1.5


def predicted_errors(
    source: str | Path,
    recipe: Recipe,
    *,
    trust_remote_code: bool = False,
    inputs: Batch | None = None,
) -> SamplingErrors:
    """The error of each sampled weight's gradient on a probe batch, by the samplers' formulas.

    Args:
        source: a local folder with weights, patched or not.
        recipe: one that samples.
        inputs: a batch to probe with; by default one is made, of text where there is a tokenizer.
    """
    from memopt.api import plan_for

    assert recipe.linears.method != "exact"
    folder = Path(source).expanduser()
    if not _has_weights(folder):
        return not_measured(recipe, "the weights are not in a local folder")
    try:
        model = load_stock(folder, trust_remote_code=trust_remote_code)
        if not _fits(model):
            return not_measured(recipe, "a training step in fp32 does not fit into memory here")
        model = nn.Module.float(model)
        plan = plan_for(model, recipe, inputs=inputs)
        probes = probe_inputs(model, folder, inputs, trust_remote_code=trust_remote_code)
        names = list(dict.fromkeys(site.module for site in plan.sampled_linears()))
        refused = [e for e in plan.refusals if e.kind == "linear"]
        sampling = Sampling(recipe.linears.method, recipe.linears.budget)
        with _Captured(model, dict.fromkeys(names, sampling)) as captured:
            training_gradients(model, probes, _DTYPE)
    except MemoptError as error:
        return not_measured(recipe, str(error).splitlines()[0].rstrip("."))
    return SamplingErrors(
        recipe.linears.method,
        recipe.linears.budget,
        probes.source,
        tuple(captured.errors),
        tuple((entry.site, entry.reason) for entry in refused),
    )


def not_measured(recipe: Recipe, why: str) -> SamplingErrors:
    """What there is to say where nothing could be measured."""
    return SamplingErrors(recipe.linears.method, recipe.linears.budget, probe="", why_not=why)


def _has_weights(folder: Path) -> bool:
    return folder.is_dir() and any(True for pattern in ("*.safetensors", "*.bin") for _ in folder.glob(pattern))


def _fits(model: nn.Module) -> bool:
    needed = sum(p.numel() for p in model.parameters()) * _DTYPE.itemsize * _COPIES
    return bool(needed < psutil.virtual_memory().available)


def verify_sampling(
    folder: Path, recipe: Recipe, *, trust_remote_code: bool = False, inputs: Batch | None = None
) -> Iterator[Check]:
    """Checks that sampling adds noise and nothing else to the gradients of the patched model in `folder`."""
    load = functools.partial(load_patched, folder, trust_remote_code=trust_remote_code, inputs=inputs, dtype=_DTYPE)
    # What else is approximate acts alike on both sides, and by no other random numbers.
    code = recipe.activations.code.removesuffix("-stochastic")
    forced = ("activations.where=all", f"activations.code={code}", "kept.method=exact")
    model = load(overrides=forced)
    samplings = {
        name: state.sampling
        for name, module in model.named_modules()
        if is_swapped(module) and isinstance(state := swap_state(module), SampledLinearRewrite)
    }
    if not samplings:
        yield Check(
            id="sampling.linears", level="gradient", subject="linears", status="skip",
            detail="no linear is sampled: each input is also held by somebody else, or can be made again",
        )  # fmt: skip
        return
    probes = probe_inputs(model, folder, inputs, trust_remote_code=trust_remote_code)
    reference_model = load(overrides=(*forced, NOTHING_SAMPLED))
    with _Captured(reference_model, samplings) as captured:
        exact_loss, exact = training_gradients(reference_model, probes, _DTYPE)
    del reference_model
    free_memory()
    draws = _Draws({f"{name}.weight" for name in samplings})
    loss = exact_loss
    for seed in range(DRAWS):
        torch.manual_seed(seed)
        model.zero_grad()
        loss, gradients = training_gradients(model, probes, _DTYPE)
        draws.add(gradients, exact)
    predicted = SamplingErrors("", 0.0, "", tuple(captured.errors)).together()
    yield from _checks(draws, predicted, abs(loss - exact_loss) / max(abs(exact_loss), 1e-30))


def _checks(draws: _Draws, predicted: float, drift: float) -> Iterator[Check]:
    reference = "fp32 run of the patched model that samples nothing"
    yield Check(
        id="sampling.loss", level="gradient", subject="loss", status=_status(drift, _ROUNDING),
        metric="relative difference", value=drift, threshold=_ROUNDING, threshold_reason="the forward is exact",
        reference=reference,
    )  # fmt: skip
    yield Check(
        id="sampling.others", level="gradient", subject="gradients of everything that is not sampled",
        status=_status(draws.others, _ROUNDING), metric="relative difference", value=draws.others,
        threshold=_ROUNDING, threshold_reason="they are exact", reference=reference,
    )  # fmt: skip
    limit = STANDARD_ERRORS * max(draws.error, predicted) / DRAWS**0.5
    yield Check(
        id="sampling.bias", level="gradient", subject=f"{len(draws.weights)} sampled weights",
        status=_status(draws.bias, limit), metric=f"relative error of the mean of {DRAWS} draws", value=draws.bias,
        threshold=limit, threshold_reason=f"{STANDARD_ERRORS:.0f} standard errors of that mean", reference=reference,
        n=DRAWS,
    )  # fmt: skip
    mean, error = draws.scale
    yield Check(
        id="sampling.scale", level="gradient", subject=f"{len(draws.weights)} sampled weights",
        status=_status(abs(mean - 1), STANDARD_ERRORS * error + _ROUNDING),
        metric="part of the exact gradient that the draws contain, less 1", value=mean - 1,
        threshold=STANDARD_ERRORS * error + _ROUNDING,
        threshold_reason=f"{STANDARD_ERRORS:.0f} standard errors of the mean over the draws", reference=reference,
        n=DRAWS,
    )  # fmt: skip
    yield Check(
        id="sampling.noise", level="gradient", subject=f"{len(draws.weights)} sampled weights",
        status=_status(draws.error, _SCATTER * predicted + _ROUNDING), metric="relative RMSE of one draw",
        value=draws.error, threshold=_SCATTER * predicted + _ROUNDING,
        threshold_reason=f"{_SCATTER} times what the sampler's formula predicts for these inputs", reference=reference,
        n=DRAWS, detail=f"predicted {predicted:.3g}",
    )  # fmt: skip


def _status(value: float, limit: float) -> Status:
    return "pass" if value <= limit else "fail"


@dataclass
class _Draws:
    """Sums over draws of the gradients of the sampled `weights`, relative to the exact ones."""

    weights: set[str]
    count: int = 0
    others: float = 0.0
    _sums: dict[str, Tensor] = field(default_factory=dict)
    _scales: list[float] = field(default_factory=list)
    _squares: float = 0.0
    _size: float = 0.0

    def add(self, gradients: Gradients, exact: Gradients) -> None:
        off = self._difference(gradients, exact, sampled=False)
        size = sum(_square(g) for name, g in exact.items() if name not in self.weights)
        self.others = max(self.others, (off / size) ** 0.5 if size else 0.0)
        self._squares += self._difference(gradients, exact, sampled=True)
        self._size = sum(_square(exact[name]) for name in self.weights if name in exact)
        along = sum(float((gradients[name].double() * exact[name].double()).sum()) for name in self.weights)
        self._scales.append(along / self._size if self._size else 1.0)
        for name in self.weights & gradients.keys():
            deviation = gradients[name] - exact[name]
            self._sums[name] = self._sums[name] + deviation if name in self._sums else deviation
        self.count += 1

    def _difference(self, gradients: Gradients, exact: Gradients, *, sampled: bool) -> float:
        names = (name for name in exact if (name in self.weights) == sampled)
        return sum(_square(gradients[name] - exact[name]) for name in names)

    @property
    def scale(self) -> tuple[float, float]:
        """Mean and its standard error of <draw, exact> / <exact, exact>: 1 for the exact gradient.

        Noise is spread over all directions, of which this is one, so that a wrong scale shows after a few draws.
        """
        return statistics.fmean(self._scales), statistics.stdev(self._scales) / self.count**0.5

    @property
    def error(self) -> float:
        """Relative RMSE of one draw."""
        return float((self._squares / self.count / self._size) ** 0.5) if self._size else 0.0

    @property
    def bias(self) -> float:
        """Relative error of the mean of all draws."""
        total = sum(_square(sum_ / self.count) for sum_ in self._sums.values())
        return float((total / self._size) ** 0.5) if self._size else 0.0


def _square(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())


class _Captured:
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

    def __enter__(self) -> _Captured:
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
