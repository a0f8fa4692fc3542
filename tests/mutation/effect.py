"""What a fault in a module changes in fp64, where nothing is rounded away: outputs, gradients, saved bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memopt.checkpoint.manifest import read_manifest
from memopt.patches.capabilities import Checks
from memopt.patches.registry import having
from memopt.trace.account import live_bytes
from memopt.verification.inputs import Probes, probe_inputs
from memopt.verification.models import cast_inputs, load_patched, load_run_free, stored_dtype
from memopt.verification.trial import loss_of, training_step
from memopt.walk.aten.precision import precise
from tests.mutation.site import Site

#: Largest relative difference of two runs of the same sums in fp64.
_NOTHING = 1e-12
#: Share of the largest gradient below which one is zero in theory (that of a key's bias).
_ZERO = 1e-10
_Run = tuple[dict[str, Tensor], int]


@dataclass(frozen=True)
class Effect:
    """The difference that a fault makes."""

    gradient: float
    """Of the loss and of every parameter's gradient: the largest, relative to its own size."""
    extra: int
    """Bytes that are alive after the forward in addition."""

    @property
    def is_nothing(self) -> bool:
        return self.gradient <= _NOTHING and not self.extra

    def is_below(self, dtype: torch.dtype) -> bool:
        """Whether a run in `dtype` cannot tell it from its own rounding."""
        return self.gradient <= torch.finfo(dtype).eps / 2 and not self.extra

    def __str__(self) -> str:
        return f"in fp64 gradients are off by {self.gradient:.2g}, {self.extra} bytes more"


def effect(folder: Path, site: Site, planted: Callable[[], AbstractContextManager[Any]]) -> Effect:
    """Run the patched model of `folder` in fp64 without the fault and with it."""
    (right, before), (wrong, after) = _run(folder), _run_with(folder, site, planted)
    if right.keys() != wrong.keys():
        return Effect(float("inf"), after - before)
    largest = max(float(gradient.square().mean()) for gradient in right.values()) ** 0.5
    off = (
        float((wrong[name] - exact).norm() / exact.norm())
        for name, exact in right.items()
        if float(exact.square().mean()) ** 0.5 > _ZERO * largest
    )
    return Effect(max(off), after - before)


def _run_with(folder: Path, site: Site, planted: Callable[[], AbstractContextManager[Any]]) -> _Run:
    with site.watched(), planted():
        return _run(folder)


def _run(folder: Path) -> _Run:
    def run(model: torch.nn.Module) -> _Run:
        probes = probe_inputs(model, folder)
        # In the stored dtype: a module in fp32 (T5's wo) saves a cast in it, whatever its producer saves.
        inputs = cast_inputs({**probes.batches[0], **probes.targets[0]}, stored_dtype(model))
        live = live_bytes(lambda: loss_of(model(**inputs)))
        # Widened when it is patched: norms are proved against stock ones, which cast to fp32.
        with contextlib.suppress(ValueError, AttributeError):  # PyTorch has no grouped products in fp64
            model.set_experts_implementation("eager")
        model.double()
        with precise(torch.float64):
            return gradients(model, probes), live

    def gradients(model: torch.nn.Module, probes: Probes) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        step = training_step(model, probes, torch.float64)
        return {name: gradient.clone() for name, gradient in step.gradients.items()} | {"loss": torch.tensor(step.loss)}

    recipe = read_manifest(folder).recipe
    # As verify does: approximations that depend on what is trained are on everywhere.
    everywhere = [setting for patch in having(Checks) for setting in patch.farthest(recipe)]
    return load_run_free(lambda: load_patched(folder, overrides=everywhere), run)
