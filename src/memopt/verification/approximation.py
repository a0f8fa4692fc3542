"""Level "gradient" of approximate recipes: the error of the gradient against its declared and predicted limits.

The forward is exact, so the loss must be exact too. Every approximation is switched on (`Checks.farthest`),
regardless of which parameters are trained. There are two limits: the error that the recipe declares, and an error
predicted from the errors of single derivatives on this model's inputs (`Checks.derivative_errors`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from memopt.environment.generators import seed_all
from memopt.patches.capabilities import Checks
from memopt.patches.checks import Check, limited, skipped, worst_name
from memopt.patches.registry import having
from memopt.plan.recipe import Recipe
from memopt.verification.models import load_run_free
from memopt.verification.trial import DTYPE, CheckpointTrial, Gradients

#: Limit for the relative difference of two losses that are the same sum in another order.
_LOSS_ROUNDING = 1e-5
#: Parameters with fewer elements, or with gradients below this share of the largest, have no limit of their own.
_FEWEST, _ZERO = 500, 1e-5
#: Limit for one parameter's gradient, as a multiple of the predicted error of the whole gradient.
_WEIGHED = 2


def verify_approximation(trial: CheckpointTrial) -> list[Check]:
    """Compare the gradients of the patched model with those of stock modules on the same weights."""
    recipe = trial.recipe
    seed_all(0)
    exact_loss, exact = load_run_free(lambda: trial.stock(DTYPE), trial.step)
    if trial.draws:  # VITS: noise, and the length of its output
        why = "its forward draws random numbers, and draws others where codes are rounded at random"
        return [skipped("gradient.loss", "loss", why)]
    everywhere = (setting for patch in having(Checks) for setting in patch.farthest(recipe))
    model = trial.patched(*everywhere, *recipe.without("sampled"))
    seed_all(0)  # compressed tensors are rounded at random
    with contextlib.ExitStack() as watched:
        errors = [watched.enter_context(patch.derivative_errors(model)) for patch in having(Checks)]
        loss, approximate = trial.step(model)
    return list(_checks(recipe, exact_loss, loss, exact, approximate, list(itertools.chain(*errors))))


def _checks(
    recipe: Recipe, exact_loss: float, loss: float, exact: Gradients, approximate: Gradients, errors: list[float]
) -> Iterator[Check]:
    both = [name for name in exact if name in approximate]
    drift = abs(loss - exact_loss) / max(abs(exact_loss), torch.finfo(DTYPE).tiny)
    yield _check("gradient.loss", "loss", drift, _LOSS_ROUNDING, "relative difference", "the forward is exact")
    error, cosine = _distance([(approximate[name], exact[name]) for name in both])
    largest = max((float(exact[name].square().mean()) for name in both), default=0.0) ** 0.5
    layers = {
        name: _distance([(approximate[name], exact[name])])[0]
        for name in both
        if exact[name].numel() >= _FEWEST and float(exact[name].square().mean()) ** 0.5 > _ZERO * largest
    }
    worst = worst_name(layers)
    detail = f"cosine {cosine:.4f}" + (f"; most in {worst}: {layers[worst]:.3g}" if worst else "")
    name = f"{len(both)} parameters"
    yield _check(
        "gradient.declared_error", name, error, recipe.gradient_error, "relative error of the gradient",
        f"declared by the recipe '{recipe.name}'", detail=detail,
    )  # fmt: skip
    if errors:
        predicted = math.sqrt(sum(each * each for each in errors))
        yield _check(
            "gradient.predicted_error", name, error, predicted, "relative error of the gradient",
            "errors of the activations' derivatives, as measured on this model's inputs, add in squares",
            detail=f"{len(errors)} activations, {min(errors):.3g} to {max(errors):.3g}",
        )  # fmt: skip
        yield _check(
            "gradient.worst_error", worst, layers[worst], _WEIGHED * predicted,
            "relative error of one parameter's gradient",
            f"{_WEIGHED} times that: each layer weighs the errors of elements differently",
        )  # fmt: skip


_check = functools.partial(limited, reference="fp32 run of stock modules on the same weights")


def _distance(pairs: list[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """|a - b| / |b| and the cosine, over all pairs (a, b)."""
    difference = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    size = sum(float(b.double().square().sum()) for _, b in pairs)
    other = sum(float(a.double().square().sum()) for a, _ in pairs)
    product = sum(float((a.double() * b.double()).sum()) for a, b in pairs)
    if not size:
        return (0.0 if not difference else math.inf), 1.0
    return math.sqrt(difference / size), product / math.sqrt(size * other) if other else 0.0
