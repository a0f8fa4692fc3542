"""Compares losses of patched heads with the stock losses, on kinds of batches that one training step may lack."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memopt.patches.checks import Check, limited
from memopt.patches.loss.module import LossRewrite
from memopt.patches.swap import state_of, stock_forwards

_ROWS, _IGNORED = 48, -100


def verify_losses(modules: Mapping[str, nn.Module], limit: float) -> Iterator[Check]:
    """A check for each patched head: loss and all gradients of random rows, for each kind of batch and reduction."""
    for name, module in modules.items():
        rewrite = state_of(module, LossRewrite)
        if rewrite is None:
            continue
        worst, batch = 0.0, "none"
        for kind, (target, options) in _batches(rewrite.classes).items():
            for reduction in ("mean", "none"):
                ours = _step(module, rewrite, target, reduction, options)
                with stock_forwards([module]):
                    stock = _step(module, rewrite, target, reduction, options)
                found = max(map(_difference, ours, stock))
                if not found <= worst:
                    worst, batch = found, f"{kind}, reduction {reduction}"
        yield limited(
            "gradient.losses", name, worst, limit,
            "largest relative difference of a loss or its gradients, labels masked, padded, ignored, smoothed",
            "only roundings of this precision may differ",
            "the stock head on the same rows", _ROWS, f"most in: {batch}",
        )  # fmt: skip


def _batches(classes: int) -> dict[str, tuple[Tensor, dict[str, Any]]]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, classes, (_ROWS,), generator=generator)
    masked = labels.masked_fill(torch.rand(_ROWS, generator=generator) < 0.4, _IGNORED)
    padded = labels.masked_fill(torch.arange(_ROWS) >= _ROWS // 3, _IGNORED)
    return {
        "all labels": (labels, {}),
        "masked": (masked, {}),
        "padded": (padded, {}),
        "all ignored": (torch.full_like(labels, _IGNORED), {}),
        "label-smoothed": (masked, {"label_smoothing": 0.1}),
    }


def _step(
    module: nn.Module, rewrite: LossRewrite, target: Tensor, reduction: str, options: dict[str, Any]
) -> list[Tensor]:
    """The loss, the loss under no_grad, and the gradients of input and parameters (zeros where there is none)."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    like = next(module.parameters())
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((_ROWS, rewrite.inputs), generator=generator, dtype=torch.float64).to(like).requires_grad_()
    weights = torch.linspace(0.5, 1.5, _ROWS, dtype=torch.float64).to(like)
    with torch.enable_grad():
        losses = F.cross_entropy(module(x), target.to(like.device), reduction=reduction, **options)
        loss = (losses * weights).sum() if losses.dim() else losses
    with torch.no_grad():
        evaluated = F.cross_entropy(module(x), target.to(like.device), reduction=reduction, **options)
    found = torch.autograd.grad(loss, (x, *parameters), allow_unused=True)
    pairs = zip((x, *parameters), found, strict=True)
    return [loss.detach(), evaluated, *(torch.zeros_like(p) if each is None else each for p, each in pairs)]


def _difference(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest element; infinite where only one of the tensors has NaN."""
    if not torch.equal(one.isnan(), other.isnan()):
        return float("inf")
    one, other = one.nan_to_num(0.0), other.nan_to_num(0.0)
    scale = max(float(other.abs().max()), float(one.abs().max()))
    return float((one - other).abs().max()) / scale if scale else 0.0
