"""Which calls of the launchers are compiled: by the tests of this folder, and for the recorded table of resources.

What takes the most registers is compiled for every target. The rest is dealt: each call for one target, so that every
target gets a quarter of the calls, of each size, dtype and kernel some. `slow` tests compile all calls for all targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import pytest
import torch

from memopt.kernels.tools.aot import TARGETS, Binary, capture
from memopt.kernels.tools.launches import CallShape, Variant

T = TypeVar("T")

ROWS = 512
#: From a head's size to the widest MLP, and an odd one, which no vector fits.
SIZES = (64, 128, 768, 1024, 2048, 4096, 4097, 5120, 8192, 14336, 16384)
#: The sizes at which some kernel takes the most registers (`benchmarks/results/kernel_resources.json`).
FULL_SIZES = {4096, 4097, 8192, 16384}
DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Case:
    """One call of a launcher."""

    variant: Variant
    hidden: int
    dtype: torch.dtype
    strided: bool = False

    @property
    def is_heaviest(self) -> bool:
        """Whether no other call of its kernel takes more registers."""
        return self.variant.heaviest and self.hidden in FULL_SIZES

    def __str__(self) -> str:
        layout = ", strided" if self.strided else ""
        return f"{self.variant}: {self.hidden} x {str(self.dtype).removeprefix('torch.')}{layout}"


def cases(variant: Variant) -> Iterator[Case]:
    """What is compiled of a variant. Kernels that see rows as such depend on their size, the others do not."""
    by_rows = variant.kernel.startswith("norm")
    one_size = 16384 if variant.kernel.startswith("loss") else 4096  # of a whole tile
    for dtype in DTYPES:
        for hidden in SIZES if by_rows else (one_size,):
            yield Case(variant, hidden, dtype)
        if variant.heaviest:
            yield Case(variant, one_size, dtype, strided=True)
            if not by_rows:
                yield Case(variant, one_size + 1, dtype, strided=True)


#: A target of each compiler: what an argument is specialised on is asked of the compiler, not of the target.
BACKENDS = ("sm_90", "gfx942")
#: Whether every call is compiled for every target: `make test` leaves that to `make test-all`.
WHOLE = [pytest.param(False, id="dealt"), pytest.param(True, id="all", marks=pytest.mark.slow)]


def dealt(calls: Iterable[T], *, whole: bool, everywhere: Callable[[T], bool], first: int = 0) -> list[tuple[T, str]]:
    """What is compiled: each call for one target in turn, or for every target if it is `everywhere`, or `whole`.

    `first` turns the deal, so that calls of the same place in several lists are compiled for different targets.
    """
    return [
        (call, target)
        for i, call in enumerate(calls)
        for j, target in enumerate(TARGETS)
        if whole or everywhere(call) or (i + first - j) % len(TARGETS) == 0
    ]


def binaries(case: Case, target: str) -> list[Binary]:
    """The kernels that one call launches, compiled for `target`."""
    call = case.variant.prepare(CallShape(ROWS, case.hidden, case.dtype, "meta", case.strided))
    with capture(target) as captured:
        call()
    return captured
