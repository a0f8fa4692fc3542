"""Which calls of the launchers are compiled: by the tests of this folder, and for the recorded table of resources.

What comes near the registers that a thread can have is compiled for every target. The rest is dealt: each call for one
target, so that every target gets a quarter of the calls, of each size, dtype and kernel some. Sizes with the code of a
larger one are left out. `slow` tests compile all calls for all targets.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from tools.kernels.aot import TARGETS, Binary, capture
from tools.kernels.launches import CallShape, Variant
from tools.kernels.occupancy import LIMITS, resident_warps

T = TypeVar("T")

ROWS = 512
#: From a head's size to the widest MLP, and an odd one, which no vector fits.
SIZES = (64, 128, 768, 1024, 2048, 4096, 4097, 5120, 8192, 14336, 16384)
#: A size is an argument of its kernel, whose code depends on the tile and on whether whole vectors fit the size: these
#: get the binaries of larger ones (`test_sizes_that_are_left_out_take_what_larger_ones_take`).
SAME_CODE = {768: 1024, 5120: 8192, 14336: 16384}
DTYPES = (torch.bfloat16, torch.float32)
RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "kernel_resources.json"


@dataclass(frozen=True)
class Case:
    """One call of a launcher."""

    variant: Variant
    hidden: int
    dtype: torch.dtype
    strided: bool = False

    @property
    def is_crowded(self) -> bool:
        """Whether a launch was recorded to take half of the registers it can have or more, or none was recorded.

        NVIDIA's targets differ by less than a factor of two, so what is below half on one of them spills on none.
        """
        return recorded().get(str(self), 1.0) >= 0.5

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


def rows() -> list[dict[str, Any]]:
    """What kernels were recorded to take: a row for each case and each kernel that its call launches."""
    found: list[dict[str, Any]] = json.loads(RECORDED.read_text())["kernels"]
    return found


@functools.cache
def recorded() -> dict[str, float]:
    """Case -> the largest share of the registers it can have that one of its kernels takes on a target."""
    shares: dict[str, float] = {}
    for row in rows():
        for target in TARGETS:
            share = share_of_registers(target, row[target]["warps"], row[target]["registers"])
            shares[row["case"]] = max(shares.get(row["case"], 0.0), share)
    return shares


def share_of_registers(target: str, warps: int, registers: int) -> float:
    """Of the registers that a thread can have on an NVIDIA GPU, where all threads of a block have to fit.

    A thread addresses 255 of them at most. AMD's GPUs have 512, so there it is more than the true share.
    """
    threads = warps * TARGETS[target].warp_size
    return registers / min(255, LIMITS["sm_90"].registers // threads)


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


def named(launches: Iterable[Binary]) -> list[tuple[str, Binary]]:
    """The launches of a call by the names of their rows: the kernel's, with a number where a call launches it again."""
    found: list[tuple[str, Binary]] = []
    times: Counter[str] = Counter()
    for binary in launches:
        times[binary.kernel] += 1
        again = f" ({times[binary.kernel]})" if times[binary.kernel] > 1 else ""
        found.append((binary.kernel + again, binary))
    return found


def resident(row: dict[str, Any], target: str) -> int:
    """Warps on a multiprocessor of an NVIDIA GPU, of a row of the table."""
    taken = row[target]
    return resident_warps(target, taken["warps"], taken["registers"], taken["shared"])


def binaries(case: Case, target: str) -> list[Binary]:
    """The kernels that one call launches, compiled for `target`."""
    call = case.variant.prepare(CallShape(ROWS, case.hidden, case.dtype, "meta", case.strided))
    with capture(target) as captured:
        call()
    return captured
