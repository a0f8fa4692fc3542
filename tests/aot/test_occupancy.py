"""Warps on a multiprocessor, against values of NVIDIA's occupancy calculator."""

from __future__ import annotations

import pytest

from tools.kernels.occupancy import resident_warps


@pytest.mark.parametrize(
    ("num_warps", "registers", "shared", "warps"),
    [
        (8, 32, 0, 64),  # full
        (8, 40, 0, 48),  # 51 warps have registers, given out in fours, so 6 blocks
        (4, 128, 0, 16),
        (8, 255, 0, 8),
        (16, 255, 0, 0),  # does not fit
        (1, 16, 0, 32),  # 32 blocks at most
        (4, 32, 48 * 1024, 12),  # 3 blocks by shared memory
        (4, 32, 163 * 1024, 4),  # 1 KiB of the system's makes it exactly full
    ],
)
def test_warps_are_limited_by_registers_shared_memory_and_blocks(
    num_warps: int, registers: int, shared: int, warps: int
) -> None:
    assert resident_warps("sm_80", num_warps, registers, shared) == warps


def test_a_gpu_with_more_shared_memory_holds_more_blocks() -> None:
    assert resident_warps("sm_90", 4, 32, 48 * 1024) == 16
