"""Which calls of the launchers are compiled: by the tests of this folder, and for the recorded table of resources."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from memopt.kernels.tools.aot import Binary, capture
from memopt.kernels.tools.launches import CallShape, Variant

ROWS = 512
#: From a head's size to the widest MLP, and an odd one, which no vector fits.
SIZES = (64, 128, 768, 1024, 2048, 4096, 4097, 5120, 8192, 14336, 16384)
DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Case:
    """One call of a launcher."""

    variant: Variant
    hidden: int
    dtype: torch.dtype
    strided: bool = False

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


def binaries(case: Case, target: str) -> list[Binary]:
    """The kernels that one call launches, compiled for `target`."""
    call = case.variant.prepare(CallShape(ROWS, case.hidden, case.dtype, "meta", case.strided))
    with capture(target) as captured:
        call()
    return captured
