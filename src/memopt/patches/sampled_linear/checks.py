"""Checks that sampling only adds noise to a model's gradients.

The forward and all gradients except those of sampled weights must be exact. For a sampled weight, the mean over draws
must be the exact gradient within three standard errors, and the error of one draw must match the sampler's formula.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import gc
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from memopt.environment.generators import seed_cpu
from memopt.kernels.sampled_linear.sampling import Method
from memopt.patches.capabilities import Checks, Trial
from memopt.patches.checks import Check, limited, worst_name
from memopt.patches.record import record_of
from memopt.patches.registry import having
from memopt.patches.sampled_linear.module import samplings_in
from memopt.patches.sampled_linear.prediction import SamplingErrors, errors_found
from memopt.patches.sampled_linear.slot import observers
from memopt.patches.scope import running_scopes
from memopt.patches.swap import stock_forwards

_REFERENCE = "fp32 run of the patched model that samples nothing"
_check = functools.partial(limited, reference=_REFERENCE, level="gradient")
Gradients = dict[str, Tensor]

#: Number of draws whose mean is compared, and how many standard errors the mean may be off.
DRAWS, STANDARD_ERRORS = 32, 3.0
#: Standard errors for each weight alone: there are hundreds of weights, with errors of few independent terms.
EACH_STANDARD_ERRORS = 6.0
#: Largest relative difference of gradients that are equal up to fp32 rounding through all layers.
_ROUNDING = 1e-4
#: A gradient's difference is relative to its own size plus this share of the largest gradient: the terms of a gradient
#: that is zero in theory (a key bias) cancel, and leave some roundings (6e-8) of the largest.
_CANCELS = 1e-2
#: Largest ratio of measured to predicted error: few draws of each weight are summed over many weights.
_SCATTER = 1.5


def verify_sampling(trial: Trial) -> Iterator[Check]:
    """Checks that sampling only adds noise to the gradients of the patched model."""
    # Both models make the other approximations alike, with the same random numbers.
    alike = [setting for patch in having(Checks) for setting in patch.repeatable(trial.recipe)]
    model = trial.patched(*alike)
    samplings = {name: state.sampling for name, state in samplings_in(model).items()}
    if not samplings:
        record, planned = record_of(model), set[str]()
        if record is not None:
            refused = {name for name, _ in record.refused}
            planned = {site.module for site in record.plan.chosen("linear", "sample")}
            planned |= {site.module for site in record.plan.sites.linears if site.module in refused}
        yield _check(
            "sampling.linears", "linears", float(len(planned)), 0.0, "planned linears that are not sampled",
            reference="the plan", n=len(planned),
            detail="no linear is sampled: something else also holds each input, or it can be recomputed",
        )  # fmt: skip
        return
    reference_model = trial.patched(*alike, *trial.recipe.without("sampled"))
    with errors_found(reference_model, samplings) as errors:
        exact_loss, exact = trial.step(reference_model)
    del reference_model
    gc.collect()
    draws, weights = _Draws({f"{name}.weight" for name in samplings}), dict[str, float]()
    loss = exact_loss
    for seed in range(DRAWS):
        seed_cpu(seed)
        model.zero_grad()
        with _weights_of_samples(model, weights) if not seed else contextlib.nullcontext():
            loss, gradients = trial.step(model)
        draws.add(gradients, exact)
    predicted = SamplingErrors("", 0.0, "", tuple(errors)).together()
    yield from _checks(draws, predicted, abs(loss - exact_loss) / max(abs(exact_loss), 1e-30))
    off, where = draws.others
    if off <= _ROUNDING:
        where = "gradients of everything that is not sampled"
    else:
        where = _culprit(trial, model, list(samplings), draws, exact) or where
    metric = "largest relative difference of a gradient that is not sampled"
    yield _check("sampling.others", where, off, _ROUNDING, metric, "they are exact")
    worst = worst_name(weights)
    yield _check(
        "sampling.weights", worst or "samples", weights.get(worst, 0.0), _ROUNDING,
        "sum of weight x score, sample / all rows, less 1", "each weight is the inverse of its row's probability",
        reference="the scores of all rows", n=len(weights),
    )  # fmt: skip
    yield from _each(draws, {f"{each.module}.weight": each.first for each in errors})


def _checks(draws: _Draws, predicted: float, drift: float) -> Iterator[Check]:
    yield _check("sampling.loss", "loss", drift, _ROUNDING, "relative difference", "the forward is exact")
    sampled = f"{len(draws.weights)} sampled weights"
    yield _check(
        "sampling.bias", sampled, draws.bias, STANDARD_ERRORS * max(draws.error, predicted) / DRAWS**0.5,
        f"relative error of the mean of {DRAWS} draws", f"{STANDARD_ERRORS:.0f} standard errors of that mean", n=DRAWS,
    )  # fmt: skip
    mean, error = draws.scale
    # A share below 1 is as wrong as one above 1.
    scale = _check(
        "sampling.scale", sampled, abs(mean - 1), STANDARD_ERRORS * error + _ROUNDING,
        "part of the exact gradient that the draws contain, less 1",
        f"{STANDARD_ERRORS:.0f} standard errors of the mean over the draws", n=DRAWS,
    )  # fmt: skip
    yield replace(scale, value=mean - 1)
    yield _check(
        "sampling.noise", sampled, draws.error, _SCATTER * predicted + _ROUNDING, "relative RMSE of one draw",
        f"{_SCATTER} times what the sampler's formula predicts for these inputs", n=DRAWS,
        detail=f"predicted {predicted:.3g}",
    )  # fmt: skip


def _culprit(trial: Trial, model: nn.Module, names: list[str], draws: _Draws, exact: Gradients) -> str:
    """The first linear, in the model's order, whose sampling changes other gradients; found by bisection."""
    modules = [model.get_submodule(name) for name in names]

    def is_wrong(count: int) -> bool:
        """Whether other gradients differ if the first `count` linears are sampled and the others are stock."""
        model.zero_grad()
        with stock_forwards(modules[count:]):
            _, gradients = trial.step(model)
        return not draws.difference(gradients, exact)[0] <= _ROUNDING

    first = bisect.bisect_left(range(len(names)), True, key=is_wrong)
    return names[first - 1] if first else ""


@contextlib.contextmanager
def _weights_of_samples(model: nn.Module, off: dict[str, float]) -> Iterator[None]:
    """Inside, the error of the weights of each scope's samples is written to `off`, by the scope's name.

    Every sampler weights a row by the inverse of its probability. So the sum of weight x score over the sample is the
    sum of all scores, whatever was drawn, and weight x score is equal for all rows that are not certain. For the
    uniform sampler both hold with scores of one.
    """

    def watch(scores: Tensor, rows: Tensor, weights: Tensor, method: Method) -> None:
        w = (scores > 0).double() if method == "uniform" else scores.double()
        total, parts = float(w.sum()), weights.double() * w[rows.long()]
        here = abs(float(parts.sum()) / total - 1) if total else 0.0
        drawn = parts[(weights != 1) & (weights != 0)]  # the other rows are certain or have weight 0
        if len(drawn):
            here = max(here, float((drawn.max() - drawn.min()) / drawn.mean().abs()))
        off[running[-1]] = max(off.get(running[-1], 0.0), here)

    with running_scopes(model) as running:
        observers.append(watch)
        try:
            yield
        finally:
            observers.remove(watch)


def _each(draws: _Draws, predicted: dict[str, float]) -> Iterator[Check]:
    """Checks of the worst single weight: the mean of its draws, and their projection on the exact gradient."""
    off = {
        name: each.bias / (max(each.error, predicted.get(name, 0.0)) / DRAWS**0.5)
        for name, each in draws.each.items()
        if each.error
    }
    parts = {
        name: abs(mean - 1) / (error + _ROUNDING)
        for name, (mean, error) in ((name, each.scale) for name, each in draws.each.items())
    }
    for id, values, metric in (
        ("sampling.weight_bias", off, f"error of the mean of {DRAWS} draws, in standard errors"),
        ("sampling.weight_scale", parts, "part of the exact gradient in the draws, less 1, in standard errors"),
    ):
        if values:
            worst = worst_name(values)
            reason = "one weight of hundreds: six standard errors"
            yield _check(id, worst, values[worst], EACH_STANDARD_ERRORS, metric, reason, n=len(values))


@dataclass
class _Draws:
    """Sums over draws of the gradients of the sampled `weights`, relative to the exact ones."""

    weights: set[str]
    count: int = 0
    others: tuple[float, str] = (0.0, "")
    """The largest relative difference of a gradient that must be exact, and the parameter's name."""
    _sums: dict[str, Tensor] = field(default_factory=dict)
    _scales: list[float] = field(default_factory=list)
    _squares: float = 0.0
    _size: float = 0.0
    each: dict[str, _Draws] = field(default_factory=dict)
    """The sums of each weight alone, by its name."""

    def add(self, gradients: Gradients, exact: Gradients) -> None:
        if len(self.weights) > 1:
            for name in self.weights & gradients.keys():
                alone = self.each.setdefault(name, _Draws({name}))
                alone.add({name: gradients[name]}, {name: exact[name]})
        self.others = max(
            self.others, self.difference(gradients, exact), key=lambda each: (each[0] != each[0], each[0])
        )
        self._squares += sum(_square(gradients[name] - exact[name]) for name in self.weights & exact.keys())
        self._size = sum(_square(exact[name]) for name in self.weights if name in exact)
        along = sum(float((gradients[name].double() * exact[name].double()).sum()) for name in self.weights)
        self._scales.append(along / self._size if self._size else 1.0)
        for name in self.weights & gradients.keys():
            deviation = gradients[name] - exact[name]
            self._sums[name] = self._sums[name] + deviation if name in self._sums else deviation
        self.count += 1

    def difference(self, gradients: Gradients, exact: Gradients) -> tuple[float, str]:
        """The largest relative difference of one step's gradients outside `weights`, and the parameter's name."""
        sizes = {name: _rms(gradient) for name, gradient in exact.items() if name not in self.weights}
        least = _CANCELS * max(sizes.values(), default=0.0)
        off = {
            name: _rms(gradients[name] - exact[name]) / (size + least) if size + least else 0.0
            for name, size in sizes.items()
        }
        worst = worst_name(off)
        return off.get(worst, 0.0), worst

    @property
    def scale(self) -> tuple[float, float]:
        """Mean and its standard error of <draw, exact> / <exact, exact>: 1 for the exact gradient. Noise spreads over
        all directions, and this is only one of them: a wrong scale shows after a few draws."""
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


def _rms(tensor: Tensor) -> float:
    return math.sqrt(_square(tensor) / max(1, tensor.numel()))


def _square(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())
