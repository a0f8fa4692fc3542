"""Level "gradient" of approximate recipes: how far the gradient is from the exact one, and whether that was declared.

The forward is exact, so the loss must be. Codes are forced on every activation that has one (``where: all``): what is
measured is the most that the recipe can be off, whatever is trained. Two limits: what the recipe declares for whole
models, and what the codes' own errors on this model's activations predict.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from memopt.kernels.derivative_codes.codes import apply_code, encode
from memopt.kernels.derivative_codes.schemes import derivative
from memopt.patches.activation.module import ActivationRewrite
from memopt.patches.swap import is_swapped, original_class, swap_state
from memopt.plan.recipe import Recipe
from memopt.verify.gradient import Gradients, training_gradients
from memopt.verify.inputs import probe_inputs
from memopt.verify.models import NOTHING_SAMPLED, free_memory, load_patched, load_stock
from memopt.verify.verdict import Check
from memopt.walk.calls.batch import Batch

#: Everything runs in fp32: its rounding (1e-6 of a gradient) is far below what any code costs.
_DTYPE = torch.float32
#: Relative difference of two losses that are the same sum in another order.
_LOSS_ROUNDING = 1e-5
#: Parameters of fewer elements, and with gradients so much smaller than the largest, say nothing of their own.
_FEWEST, _ZERO = 500, 1e-5
#: How much more than the sum of all errors one parameter's gradient may be off.
_WEIGHED = 2


def verify_approximation(
    folder: Path, recipe: Recipe, *, trust_remote_code: bool = False, inputs: Batch | None = None
) -> list[Check]:
    """Compare the gradients of the patched model with those of stock modules on the same weights."""
    stock = load_stock(folder, dtype=_DTYPE, trust_remote_code=trust_remote_code)
    probes = probe_inputs(stock, folder, inputs, trust_remote_code=trust_remote_code)
    exact_loss, exact = training_gradients(stock, probes, _DTYPE)
    del stock
    free_memory()
    forced = ("activations.where=all", NOTHING_SAMPLED)
    model = load_patched(folder, trust_remote_code=trust_remote_code, inputs=inputs, dtype=_DTYPE, overrides=forced)
    torch.manual_seed(0)  # of codes that round at random
    with _watched(model) as errors:
        loss, approximate = training_gradients(model, probes, _DTYPE)
    return list(_checks(recipe, exact_loss, loss, exact, approximate, errors))


def _checks(
    recipe: Recipe, exact_loss: float, loss: float, exact: Gradients, approximate: Gradients, errors: list[float]
) -> Iterator[Check]:
    both = [name for name in exact if name in approximate]
    drift = abs(loss - exact_loss) / max(abs(exact_loss), torch.finfo(_DTYPE).tiny)
    yield _check("gradient.loss", "loss", drift, _LOSS_ROUNDING, "relative difference", "the forward is exact")
    error, cosine = _distance([(approximate[name], exact[name]) for name in both])
    largest = max((float(exact[name].square().mean()) for name in both), default=0.0) ** 0.5
    layers = {
        name: _distance([(approximate[name], exact[name])])[0]
        for name in both
        if exact[name].numel() >= _FEWEST and float(exact[name].square().mean()) ** 0.5 > _ZERO * largest
    }
    worst = max(layers, key=lambda name: (math.isnan(layers[name]), layers[name]), default="")
    detail = f"cosine {cosine:.4f}" + (f"; most in {worst}: {layers[worst]:.3g}" if worst else "")
    name = f"{len(both)} parameters"
    yield _check(
        "gradient.declared_error", name, error, recipe.gradient_error, "relative error of the gradient",
        f"declared by the recipe '{recipe.name}'", detail,
    )  # fmt: skip
    if errors:
        predicted = math.sqrt(sum(each * each for each in errors))
        reason = "errors of the activations' derivatives, as measured on this model's inputs, add in squares"
        yield _check(
            "gradient.predicted_error",
            name,
            error,
            predicted,
            "relative error of the gradient",
            reason,
            f"{len(errors)} activations, {min(errors):.3g} to {max(errors):.3g}",
        )
        yield _check(
            "gradient.worst_error",
            worst,
            layers[worst],
            _WEIGHED * predicted,
            "relative error of one parameter's gradient",
            f"{_WEIGHED} times that: the gradient of one layer weighs elements in its own way",
        )


def _check(id: str, subject: str, value: float, limit: float, metric: str, reason: str, detail: str = "") -> Check:
    return Check(
        id=id,
        level="gradient",
        subject=subject,
        status="pass" if value <= limit else "fail",
        metric=metric,
        value=value,
        threshold=limit,
        threshold_reason=reason,
        reference="fp32 run of stock modules on the same weights",
        detail=detail,
    )


def _distance(pairs: list[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """|a - b| / |b| and the cosine, over all pairs (a, b)."""
    off = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    size = sum(float(b.double().square().sum()) for _, b in pairs)
    other = sum(float(a.double().square().sum()) for a, _ in pairs)
    product = sum(float((a.double() * b.double()).sum()) for a, b in pairs)
    if not size:
        return (0.0 if not off else math.inf), 1.0
    return math.sqrt(off / size), product / math.sqrt(size * other) if other else 0.0


class _watched:
    """Inside, the relative error of every coded activation's derivative, at the inputs that it gets."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [module for module in model.modules() if is_swapped(module)]
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self.errors: list[float] = []

    def __enter__(self) -> list[float]:
        for module in self._modules:
            rewrite = swap_state(module)
            if isinstance(rewrite, ActivationRewrite) and rewrite.code is not None:
                measure = functools.partial(self._measure, rewrite)
                self._handles.append(module.register_forward_hook(measure))
        return self.errors

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _measure(self, rewrite: ActivationRewrite, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        code, z = rewrite.code, args[0].detach().float()
        assert code is not None
        stock = functools.partial(original_class(module).forward, module)
        with torch.no_grad():
            exact = derivative(stock, z)
            approximate = apply_code(torch.ones_like(z), encode(z, code, seed=1), code)
        self.errors.append(_distance([(approximate, exact)])[0])
