"""Level "gradient": every parameter's gradient is as close to the truth as that of stock modules.

Both models have the same (patched) weights, so that only the modules differ. The truth is the stock model in fp64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memopt.checks import Check, ratio_status
from memopt.plan.recipe import Recipe
from memopt.verification.forward import FLOOR_ROUNDOFFS, PASS_RATIO, WARN_RATIO
from memopt.verification.inputs import Probes, probe_inputs
from memopt.verification.models import (
    Reference,
    cast_inputs,
    choose_reference,
    floating_outputs,
    load_patched,
    load_run_free,
    load_stock,
    stored_dtype,
)
from memopt.walk.aten.precision import precise
from memopt.walk.calls.batch import Batch

#: (fewest elements, largest ratio). Few elements make a noisy ratio; PyTorch's benchmarks allow 10 for small tensors.
_EACH_RATIO = ((500, 2.0), (16, 3.0), (0, 10.0))

#: Reference dtype -> share of the model's largest gradient below which a gradient is zero in theory.
_ZERO = {torch.float64: 1e-10, torch.float32: 1e-5}

Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class _Stock:
    """The run of stock modules, and the probes and dtypes of all runs."""

    loss: float
    gradients: Gradients
    dtype: torch.dtype
    reference: Reference
    probes: Probes


def verify_gradient(
    folder: Path, recipe: Recipe, *, trust_remote_code: bool = False, inputs: Batch | None = None
) -> list[Check]:
    """Compare the gradient of every parameter that both models train; sampling is switched off."""
    load = functools.partial(load_stock, folder, trust_remote_code=trust_remote_code)

    def run_stock(model: nn.Module) -> _Stock | None:
        dtype = stored_dtype(model)
        reference = choose_reference(sum(p.numel() for p in model.parameters()), dtype, copies=4)
        if reference is None:
            return None
        probes = probe_inputs(model, folder, inputs, trust_remote_code=trust_remote_code)
        return _Stock(*training_gradients(model, probes, dtype), dtype, reference, probes)

    stock = load_run_free(load, run_stock)
    if stock is None:
        return [_skip("no more precise run than the model's own fits into memory")]
    reference = stock.reference
    exact = recipe.without("sampled")
    patched_loss, patched_gradients = load_run_free(
        functools.partial(load_patched, folder, trust_remote_code=trust_remote_code, inputs=inputs, overrides=exact),
        lambda model: training_gradients(model, stock.probes, stock.dtype),
    )

    def true_gradients(model: nn.Module) -> Gradients:
        with precise(reference.dtype):
            return training_gradients(model, stock.probes, reference.dtype)[1]

    truth = load_run_free(functools.partial(load, dtype=reference.dtype), true_gradients)
    source = f"{reference.name} run of stock modules on the same weights"
    missing = sorted(set(patched_gradients) - set(stock.gradients))
    if missing:
        why = f"stock modules give {missing[0]} no gradient, patched ones do"
        return [Check("gradient.parameters", "gradient", "parameters", "fail", detail=why)]
    return list(
        compare_gradients(patched_gradients, stock.gradients, truth, stock.dtype, source, stock.loss, patched_loss)
    )


def compare_gradients(
    patched: Gradients,
    stock: Gradients,
    truth: Gradients,
    dtype: torch.dtype,
    reference: str,
    stock_loss: float,
    patched_loss: float,
) -> Iterator[Check]:
    """Checks on the ratio of errors: the median over parameters, and the worst against its own limit."""
    largest = max(_rms(gradient.double()) for gradient in truth.values())
    ratios = {name: _ratio(patched[name], stock[name], truth[name], dtype, largest) for name in patched}
    limits = {name: _limit(truth[name].numel()) for name in ratios}
    median = float(torch.tensor(sorted(ratios.values())).median())
    worst = max(ratios, key=lambda name: (ratios[name] != ratios[name], ratios[name] / limits[name]))
    loss = f"loss {patched_loss:.6f}, stock {stock_loss:.6f}"
    yield Check(
        id="gradient.median_error_ratio",
        level="gradient",
        subject=f"{len(ratios)} parameters",
        status=ratio_status(median, PASS_RATIO, WARN_RATIO),
        metric="median of RMS error / stock modules' own",
        value=median,
        threshold=PASS_RATIO,
        threshold_reason="the same arithmetic in another order",
        reference=reference,
        n=len(ratios),
        detail=loss,
    )
    yield Check(
        id="gradient.worst_error_ratio",
        level="gradient",
        subject=worst,
        status="pass" if ratios[worst] <= limits[worst] else "fail",
        metric="worst RMS error / stock modules' own",
        value=ratios[worst],
        threshold=limits[worst],
        threshold_reason="2, or 3 below 500 elements and 10 below 16, where the ratio is noisy",
        reference=reference,
        n=truth[worst].numel(),
    )


def _ratio(patched: Tensor, stock: Tensor, truth: Tensor, dtype: torch.dtype, largest: float) -> float:
    exact, roundoff = truth.double(), torch.finfo(dtype).eps / 2
    error, own = _rms(patched.double() - exact), _rms(stock.double() - exact)
    floor = FLOOR_ROUNDOFFS * roundoff * _rms(exact)
    if _rms(exact) <= _ZERO[truth.dtype] * largest:
        # Zero in theory (a key bias): both models have only the rounding of terms that cancel.
        floor = roundoff * largest
    bound = max(own, floor / PASS_RATIO)
    if bound == 0:
        return 0.0 if error == 0 else float("inf")
    return error / bound


def _limit(elements: int) -> float:
    return next(ratio for fewest, ratio in _EACH_RATIO if elements >= fewest)


def _rms(tensor: Tensor) -> float:
    return float(tensor.square().mean().sqrt())


def training_gradients(model: nn.Module, probes: Probes, dtype: torch.dtype) -> tuple[float, Gradients]:
    """Loss and gradients of the first probe. Eval mode: dropout off."""
    loss = training_loss(model, cast_inputs({**probes.batches[0], **probes.targets[0]}, dtype))
    loss.backward()
    gradients = {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), gradients


def training_loss(model: Callable[..., Any], inputs: dict[str, Any]) -> Tensor:
    """The model's own loss where it has one; else a fixed random projection of its floating-point outputs."""
    output = model(**inputs)
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


def _skip(reason: str) -> Check:
    return Check(id="gradient.median_error_ratio", level="gradient", subject="parameters", status="skip", detail=reason)
