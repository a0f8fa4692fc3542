"""Level "gradient": every parameter's gradient is as close to the truth as the gradient from stock modules.

Both models have the same (patched) weights, so only the modules differ. The truth is the stock model in fp64. In the
stored dtype only errors larger than rounding show; in fp64 (`memopt.verification.modules`) all do.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn

from memopt.errors import first_of
from memopt.patches.capabilities import EngineSettings
from memopt.patches.checks import Check, limited, skipped
from memopt.patches.registry import having
from memopt.verification.forward import FLOOR_ROUNDOFFS, PASS_RATIO, WARN_RATIO
from memopt.verification.models import Reference, load_run_free, reference_for, stored_dtype
from memopt.verification.modules import Traces, traced, verify_modules
from memopt.verification.ratios import (
    STOCK_RUNS,
    SYSTEMATIC,
    chance_ratio,
    fewest_elements,
    independent_errors,
    independent_in_rank,
    rms,
    typical_errors,
)
from memopt.verification.stochastic import RandomRounding
from memopt.verification.trial import CheckpointTrial, Gradients, Step, StoredRun, training_step
from memopt.walk.aten.precision import precise

#: Reference dtype -> share of the model's largest gradient below which a gradient is zero in theory.
_ZERO = {torch.float64: 1e-10, torch.float32: 1e-5}


def verify_gradient(trial: CheckpointTrial) -> list[Check]:
    """Compare the gradients of both models, with sampling and approximation switched off."""
    load_exact = functools.partial(trial.patched, *trial.exact, dtype=None)
    stock = load_run_free(trial.stock, functools.partial(trial.stored_run, training_step, 4))
    if stock is None:
        return [_skipped("no more precise run than the model's own fits into memory")]
    wide, probes = stock.reference.dtype, stock.probes
    patched = load_run_free(load_exact, lambda model: training_step(model, probes, stock.dtype))

    def true_step(model: nn.Module) -> tuple[Step, Traces]:
        with precise(wide):
            return traced(model, lambda: training_step(model, probes, wide))

    truth, traces = load_run_free(functools.partial(trial.stock, wide), true_step)
    source = f"{stock.reference.name} run of stock modules on the same weights"
    compared = functools.partial(
        compare_gradients, truth=truth.gradients, dtype=stock.dtype, reference=source, stock_loss=stock.result.loss,
        patched_loss=patched.loss,
    )  # fmt: skip

    def rounded() -> tuple[list[Step], list[Step]]:
        ours = load_run_free(load_exact, functools.partial(_rounded_at_random, stock, 2))
        return ours, load_run_free(trial.stock, functools.partial(_rounded_at_random, stock, STOCK_RUNS - 1))

    bottleneck = fewest_elements(truth.outputs[name] for name in truth.read)
    return [
        check_parameters(patched.gradients, truth.gradients, trial.folded),
        *ratios(compared, patched, stock.result, rounded, bottleneck),
        *load_run_free(
            functools.partial(load_exact, dtype=wide),
            lambda model: list(verify_modules(model, probes, truth, traces, wide, source)),
        ),
    ]


def ratios(
    compared: Callable[..., Iterable[Check]],
    patched: Step,
    stock: Step,
    rounded: Callable[[], tuple[list[Step], list[Step]]],
    bottleneck: int = 2**63,
) -> list[Check]:
    """The checks on the ratio of errors in one run of each model; if a check does not pass, in several runs of each.
    `compared` is :func:`compare_gradients`, but for the runs; `rounded` returns the further runs, rounded at random, of
    the patched model and of stock modules; `bottleneck`, see there, is used for several runs only."""
    checks = list(compared([patched.gradients], [stock.gradients]))
    if any(check.status in ("warn", "fail") for check in checks):
        ours, theirs = rounded()
        runs = ([run.gradients for run in each] for each in ([patched, *ours], [stock, *theirs]))
        checks = list(compared(*runs, bottleneck=bottleneck))
    return checks


def stock_runs(trial: CheckpointTrial) -> bool | None:
    """Whether a stock training step runs here in eval mode, in the stored dtype and the reference's, with the recipe's
    attention. None if the model does not fit into memory at these precisions: nothing is known then."""
    settings = [patch.engine_settings(trial.recipe, ()) for patch in having(EngineSettings)]
    attention = next((each["attn_implementation"] for each in settings if "attn_implementation" in each), None)

    def step(model: nn.Module, dtype: torch.dtype) -> None:
        probes = trial.probes(model)
        if attention is not None:
            cast(Any, model).set_attn_implementation(attention)
        training_step(model, probes, dtype)

    def stored_step(model: nn.Module) -> Reference | None:
        step(model, stored_dtype(model))
        return reference_for(model, copies=4)

    try:
        reference = load_run_free(trial.stock, stored_step)
        if reference is not None:
            load_run_free(functools.partial(trial.stock, reference.dtype), lambda model: step(model, reference.dtype))
    except Exception:  # an operation that this machine lacks, or a refusal of the model's own code
        return False
    return None if reference is None else True


def _rounded_at_random(stock: StoredRun[Step], runs: int, model: nn.Module) -> list[Step]:
    with RandomRounding(stock.dtype):
        return [training_step(model, stock.probes, stock.dtype) for _ in range(runs)]


def check_parameters(patched: Gradients, stock: Gradients, folded: frozenset[str]) -> Check:
    """Every parameter that stock modules train has a gradient, except those that a fold made constant, and no other has
    one."""
    lost = sorted(name for name in stock.keys() - patched.keys() if name.rpartition(".")[0] not in folded)
    extra = sorted(patched.keys() - stock.keys())
    wrong = [f"{name} has no gradient" for name in lost] + [
        f"{name} has one, and none in stock modules" for name in extra
    ]
    return limited(
        "gradient.parameters", (lost + extra)[0] if wrong else "parameters", len(wrong), 0,
        "parameters whose gradient is missing or extra", "only parameters that a fold made constant are not trained",
        "stock modules, less the folds in memopt.json", len(stock), first_of(wrong, between="; "),
    )  # fmt: skip


def compare_gradients(
    patched: Sequence[Gradients],
    stock: Sequence[Gradients],
    truth: Gradients,
    dtype: torch.dtype,
    reference: str,
    stock_loss: float,
    patched_loss: float,
    bottleneck: int = 2**63,
) -> Iterator[Check]:
    """Checks on the ratio of errors: the median over parameters, and the worst against its own limit.

    Args:
        patched: gradients of runs of the patched model; the median of their errors counts.
        stock: gradients of one run of the stock model, or of `memopt.verification.ratios.STOCK_RUNS` runs.
        bottleneck: elements of the smallest tensor through which all gradients pass: its roundings are in all of them.
    """
    names = sorted(patched[0].keys() & stock[0].keys() & truth.keys())
    if not names:
        yield _skipped("no parameter has a gradient in both models")
        return
    largest = max(map(rms, truth.values()))
    sizes = {name: rms(truth[name]) for name in names}
    errors = {name: torch.stack([run[name].double() - truth[name].double() for run in stock]) for name in names}
    own = {name: rms(errors[name]) / sizes[name] for name in names if sizes[name] > _ZERO[truth[name].dtype] * largest}
    typical = typical_errors(own, truth)
    unit = torch.finfo(dtype).eps / 2
    found, limits = {}, {}
    for name in names:
        # A gradient that is zero in theory (a key bias) is only the rounding of terms that cancel.
        rounding = FLOOR_ROUNDOFFS * unit * (sizes[name] if name in own else largest)
        bound = max(rms(errors[name]), typical.get(name, 0.0) * sizes[name], rounding / PASS_RATIO)
        error = statistics.median(rms(run[name].double() - truth[name].double()) for run in patched)
        found[name] = error / bound if bound else 0.0 if error == 0 else float("inf")
        independent = independent_errors(errors[name][0], bottleneck)
        limits[name] = SYSTEMATIC * chance_ratio(independent, len(stock))
        if len(stock) > 1 and found[name] > limits[name]:  # products of large matrices, where they decide
            independent = int(min(independent, independent_in_rank(errors[name][0])))
            limits[name] = SYSTEMATIC * chance_ratio(independent, len(stock))
    median = statistics.median(found.values())
    worst = max(names, key=lambda name: (found[name] != found[name], found[name] / limits[name]))
    yield limited(
        "gradient.median_error_ratio", f"{len(found)} parameters", median, PASS_RATIO,
        "median of RMS error / stock modules' own", "the same arithmetic in another order", reference, len(found),
        f"loss {patched_loss:.6f}, stock {stock_loss:.6f}", warns=WARN_RATIO,
    )  # fmt: skip
    yield limited(
        "gradient.worst_error_ratio", worst, found[worst], limits[worst], "worst RMS error / stock modules' own",
        "2, times the quantile of the ratio for so many independent errors", reference, truth[worst].numel(),
    )  # fmt: skip


_skipped = functools.partial(skipped, "gradient.median_error_ratio", "parameters")
