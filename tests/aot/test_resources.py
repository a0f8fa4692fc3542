"""What the compiled kernels take, through their real launchers, on four GPUs that need not be there."""

from __future__ import annotations

import pytest
import torch

from tests.aot.cases import (
    SAME_CODE,
    WHOLE,
    Case,
    binaries,
    cases,
    dealt,
    named,
    recorded,
    resident,
    rows,
    share_of_registers,
)
from tools.kernels.aot import SHARED_LIMIT, TARGETS, Binary
from tools.kernels.launches import VARIANTS
from tools.kernels.occupancy import LIMITS, resident_warps

VECTOR_BITS = 128

#: Kernels that store nothing but sums: one number in some hundred, so its width does not matter.
STORE_SUMS = {"norm_sums_kernel", "loss_forward_kernel"}

Compiled = list[tuple[Case, str, Binary]]
"""Each launch with the name of its row in the table."""


@pytest.fixture(scope="module", params=WHOLE)
def whole(request: pytest.FixtureRequest) -> bool:
    return request.param


# One fixture value at a time: pytest runs the tests of a variant side by side, and compiles it once.
@pytest.fixture(scope="module", params=range(len(VARIANTS)), ids=[str(variant) for variant in VARIANTS])
def compiled(request: pytest.FixtureRequest, whole: bool) -> Compiled:
    """Launches of one variant."""
    calls = (case for case in cases(VARIANTS[request.param]) if whole or case.hidden not in SAME_CODE)
    chosen = dealt(calls, whole=whole, first=request.param, everywhere=lambda case: case.is_crowded)
    return [(case, *launch) for case, target in chosen for launch in named(binaries(case, target))]


def test_no_kernel_spills_registers(compiled: Compiled) -> None:
    assert not [
        f"{case}, {name} on {binary.target}: {binary.spilled} bytes"
        for case, name, binary in compiled
        if binary.spilled
    ]


def test_no_kernel_takes_more_than_its_row_says(compiled: Compiled) -> None:
    """Warps on a multiprocessor may only become more: ``python -m benchmarks.kernel_resources`` records the table."""
    table = {(row["case"], row["function"]): row for row in rows()}
    worse = []
    for case, name, binary in compiled:
        row = table[str(case), name]
        assert binary.spilled <= row[binary.target]["spilled"], (str(case), name, binary.target)
        if binary.target in LIMITS:
            warps = resident_warps(binary.target, binary.num_warps, binary.registers, binary.shared)
            if warps < resident(row, binary.target):
                worse.append(f"{case}, {name} on {binary.target}: {warps}, not {resident(row, binary.target)} warps")
    assert not worse


def test_a_norms_backward_fills_half_of_a_multiprocessor_or_reads_ahead() -> None:
    """32 warps that read 16 bytes a thread and tensor have 32 KiB underway; an H100 needs about 20: 3.0 TB/s for 0.9
    microseconds, over 132 multiprocessors. What reads ahead has its next rows underway, 16 KiB of each tensor.
    """
    for row in rows():
        if row["function"].startswith("norm_backward_kernel") and " 4097 " not in row["case"]:
            for target in LIMITS:
                reads_ahead = row[target]["shared"] >= 2 * 16384 + 64
                assert resident(row, target) >= (16 if reads_ahead else 28), (row["case"], target)


#: Multiprocessors and bytes of the cache, as NVIDIA publishes them: A100, H100 and B200.
CACHES = {"sm_80": (108, 40 << 20), "sm_90": (132, 50 << 20), "sm_100": (148, 126 << 20)}


@pytest.mark.parametrize("kernel", ["norm_forward", "norm_backward"])
@pytest.mark.parametrize("target", LIMITS)
def test_what_is_read_twice_is_still_in_the_cache(kernel: str, target: str) -> None:
    """Rows longer than the tile, up to twice the longest: all rows that are underway at a time fit."""
    multiprocessors, cache = CACHES[target]
    variant = next(v for v in VARIANTS if v.kernel == kernel and v.heaviest)
    launched = binaries(Case(variant, 32768, torch.bfloat16), target)
    (binary,) = [each for each in launched if "_long_" in each.kernel]
    programs = resident_warps(target, binary.num_warps, binary.registers, binary.shared) // binary.num_warps
    tensors = 2 if kernel == "norm_backward" else 1
    assert multiprocessors * programs * tensors * 32768 * 2 <= cache


def test_shared_memory_is_within_the_limit_of_a_block(compiled: Compiled) -> None:
    assert not [
        f"{case}, {name} on {binary.target}"
        for case, name, binary in compiled
        if binary.shared > SHARED_LIMIT[binary.target]
    ]


def test_rows_of_whole_vectors_are_read_and_written_in_vectors(compiled: Compiled) -> None:
    long = {str(case) for case, name, _ in compiled if name == "norm_long_dx_kernel"}  # a second launch sums
    narrow = [
        f"{case}, {name} on {binary.target}: {kind}s of {sorted(set(widths))} bits"
        for case, name, binary in compiled
        for kind, widths in binary.widths.items()
        if case.hidden * case.dtype.itemsize % 16 == 0
        and max(widths) < VECTOR_BITS
        and not (kind == "store" and (binary.kernel in STORE_SUMS or (str(case) in long and "_long_" not in name)))
    ]
    assert not narrow


def test_nothing_is_computed_in_bf16(compiled: Compiled) -> None:
    assert not [f"{case}, {name} on {binary.target}" for case, name, binary in compiled if binary.bf16_arithmetic]


@pytest.mark.parametrize(("left_out", "larger"), SAME_CODE.items())
def test_sizes_that_are_left_out_take_what_larger_ones_take(left_out: int, larger: int) -> None:
    """In the recorded table, which ``python -m benchmarks.kernel_resources --check`` compares with binaries."""
    taken = {(row["case"], row["function"]): {target: row[target] for target in TARGETS} for row in rows()}
    pairs = [
        (numbers, taken[case.replace(f": {left_out} x", f": {larger} x"), function])
        for (case, function), numbers in taken.items()
        if f": {left_out} x" in case
    ]
    assert len(pairs) > 20
    assert all(one == other for one, other in pairs)


def test_what_is_left_to_some_targets_is_far_from_spilling_on_the_others(compiled: Compiled) -> None:
    """Why three targets can be left out of `make test` where `Case.is_crowded` says no."""
    assert not [
        f"{case}, {name} on {binary.target}: {binary.registers} registers"
        for case, name, binary in compiled
        if not case.is_crowded and share_of_registers(binary.target, binary.num_warps, binary.registers) >= 0.5
    ]


def test_nvidias_targets_take_alike_and_some_launches_are_crowded() -> None:
    for row in rows():
        taken = [row[target]["registers"] for target in LIMITS]
        assert max(taken) < 2 * min(taken), row["case"]
    assert recorded()["norm_backward, layer, weight, bias: 4097 x bfloat16"] >= 1.0
