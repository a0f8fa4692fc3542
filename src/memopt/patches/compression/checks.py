"""Check that quantised tensors differ from the originals only by rounding, block by block.

In one training step every decoded tensor that backward reads is compared with its original. An element may be off by
one step; the mean error must be 0 within its standard errors. Each group's step is (maximum - minimum) / 255.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from memopt.kernels.quantize.layout import GROUP, LEVELS
from memopt.patches.capabilities import Trial
from memopt.patches.checks import Check, limited, worst_name
from memopt.patches.compression.compressor import Compressor
from memopt.patches.scope import running_scopes

#: Largest allowed mean of the rounding errors, which are unbiased, in standard errors of that mean.
_STANDARD_ERRORS = 6.0


def verify_rounding(trial: Trial) -> Iterator[Check]:
    """Two checks: the largest error in steps, and the mean error."""
    model = trial.patched(*trial.recipe.without("sampled"))
    with running_scopes(model) as running:
        seen = _Observed(running)
        Compressor.observers.append(seen.saved)
        try:
            trial.step(model)
        finally:
            Compressor.observers.remove(seen.saved)
    if not seen.largest:
        yield Check("quantised.steps", "gradient", "blocks", "skip", detail="no tensor was quantised in this step")
        return
    worst = worst_name(seen.largest)
    yield limited(
        "quantised.steps", worst, seen.largest[worst], 1.0, "largest error of an element, in steps",
        "the largest error of rounding to a level", "the saved tensors, and steps computed from them", seen.elements,
        level="gradient",
    )  # fmt: skip
    bias = {name: abs(total) / (0.5 * count**0.5) for name, (total, count) in seen.sums.items()}
    worst = worst_name(bias)
    yield limited(
        "quantised.bias", worst, bias[worst], _STANDARD_ERRORS, "mean error of saved elements, in standard errors",
        "stochastic rounding has no bias", "what was saved", seen.elements, level="gradient",
    )  # fmt: skip


class _Observed:
    """Compares quantised tensors with their originals, for each scope that saved tensors."""

    def __init__(self, running: Sequence[str]) -> None:
        self.largest: dict[str, float] = {}
        self.sums: dict[str, tuple[float, int]] = {}
        self.elements = 0
        self._running = running

    def saved(self, elements: Tensor, view: tuple[Any, ...]) -> Any:
        """An observer of `Compressor`; returns the function that compares the decoded tensor with these elements."""
        values = elements.detach().double()
        groups = pad(values, (0, -values.numel() % GROUP)).view(-1, GROUP)
        inside = torch.arange(groups.numel()).view_as(groups) < values.numel()
        high, low = groups.where(inside, -torch.inf).amax(1), groups.where(inside, torch.inf).amin(1)
        steps = ((high - low) / LEVELS).repeat_interleave(GROUP)[: values.numel()]
        # Decoding rounds minimum + code * step in fp32, and then to the dtype.
        rounding = torch.maximum(high.abs(), low.abs()).repeat_interleave(GROUP)[: values.numel()]
        rounding = 2 * rounding * max(torch.finfo(elements.dtype).eps, torch.finfo(torch.float32).eps)
        return functools.partial(
            self._decoded, self._running[-1], *(each.clone().as_strided(*view) for each in (values, steps, rounding))
        )

    def _decoded(self, name: str, values: Tensor, steps: Tensor, rounding: Tensor, decoded: Tensor) -> None:
        error = decoded.detach().double() - values
        beyond = (error.abs() - rounding).clamp(min=0) / steps.clamp(min=torch.finfo(torch.float64).tiny)
        beyond = beyond.where(steps > 0, (error.abs() > rounding) * torch.inf)
        beyond = beyond.where(~error.isnan() | values.isnan(), torch.inf)
        self.largest[name] = max(self.largest.get(name, 0.0), float(beyond.nan_to_num(0.0, posinf=torch.inf).max()))
        is_rounded = (steps > rounding) & error.isfinite()
        total, count = self.sums.get(name, (0.0, 0))
        here = float((error / steps).where(is_rounded, 0.0).sum())
        self.sums[name] = (total + here, count + int(is_rounded.sum()))
        self.elements += values.numel()
