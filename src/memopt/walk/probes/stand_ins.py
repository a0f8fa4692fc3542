"""Tiny children that replace a module's own, so that its forward can be run and compared with a formula."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from memopt.walk.aten.precision import Float64Mode
from memopt.walk.probes.isolate import with_stand_ins


class Marker(nn.Module):
    """Shows in its output how often it was applied. Replaces a dropout."""

    def forward(self, x: Tensor) -> Tensor:
        return 3 * x + 1


class Scrambler(nn.Module):
    """Its output shows any change of its input, also of the scale, which a norm would hide. Replaces a norm."""

    def __init__(self, width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.mix = linear(width, width, generator)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.mix(x))


@torch.no_grad()
def linear(width_in: int, width_out: int, generator: torch.Generator) -> nn.Linear:
    """A random linear in fp64."""
    random = nn.Linear(width_in, width_out, dtype=torch.float64, device="cpu")
    for parameter in random.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return random


def run(
    module: nn.Module,
    stand_ins: Mapping[str, nn.Module],
    call: Callable[[nn.Module], Any],
    *,
    training: bool,
    native: bool = False,
) -> Tensor | None:
    """Result of `call` on a copy of `module` with stand-ins for children; in fp64 throughout unless `native`.

    None where it raises, returns anything but one tensor, or changes an attribute of the module.
    """
    alone = with_stand_ins(module, stand_ins, training=training)
    before = dict(vars(alone))
    try:
        with torch.random.fork_rng(devices=[]), nullcontext() if native else Float64Mode():
            y = call(alone)
    except Exception:  # a forward may raise anything
        return None
    after = vars(alone)
    untouched = after.keys() == before.keys() and all(after[name] is value for name, value in before.items())
    return y if untouched and isinstance(y, Tensor) else None
