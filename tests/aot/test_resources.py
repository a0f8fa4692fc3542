"""What the compiled kernels take, through their real launchers, on four GPUs that need not be there."""

from __future__ import annotations

import pytest

from memopt.kernels.tools.aot import SHARED_LIMIT, TARGETS, Binary
from memopt.kernels.tools.launches import VARIANTS
from memopt.kernels.tools.occupancy import LIMITS
from tests.aot.cases import SAME_CODE, WHOLE, Case, binaries, cases, dealt, recorded, rows, share_of_registers

VECTOR_BITS = 128

#: Kernel in the launch table, size -> bytes that a thread may spill there.
MAY_SPILL = {
    # No model has an odd hidden size. Its rows are read element by element, which takes more registers than whole
    # vectors do, and a tile of 8192 has none to spare. Smaller tiles would read models' rows (4096 + 16 n) twice.
    ("norm_backward", 4097): 160,
}
#: Kernels that store nothing but sums: one number in some hundred, so its width does not matter.
STORE_SUMS = {"norm_long_sums_kernel", "norm_sums_kernel", "loss_forward_kernel"}

Compiled = list[tuple[Case, Binary]]


@pytest.fixture(scope="module", params=WHOLE)
def whole(request: pytest.FixtureRequest) -> bool:
    return request.param


# One fixture value at a time: pytest runs the tests of a variant side by side, and compiles it once.
@pytest.fixture(scope="module", params=range(len(VARIANTS)), ids=[str(variant) for variant in VARIANTS])
def compiled(request: pytest.FixtureRequest, whole: bool) -> Compiled:
    """Launches of one variant."""
    calls = (case for case in cases(VARIANTS[request.param]) if whole or case.hidden not in SAME_CODE)
    chosen = dealt(calls, whole=whole, first=request.param, everywhere=lambda case: case.is_crowded)
    return [(case, binary) for case, target in chosen for binary in binaries(case, target)]


def test_no_kernel_spills_registers(compiled: Compiled) -> None:
    assert not [
        f"{case}, {binary.kernel} on {binary.target}: {binary.spilled} bytes"
        for case, binary in compiled
        if binary.spilled > MAY_SPILL.get((case.variant.kernel, case.hidden), 0)
    ]


def test_shared_memory_is_within_the_limit_of_a_block(compiled: Compiled) -> None:
    assert not [
        f"{case}, {binary.kernel} on {binary.target}"
        for case, binary in compiled
        if binary.shared > SHARED_LIMIT[binary.target]
    ]


def test_rows_of_whole_vectors_are_read_and_written_in_vectors(compiled: Compiled) -> None:
    narrow = [
        f"{case}, {binary.kernel} on {binary.target}: {kind}s of {sorted(set(widths))} bits"
        for case, binary in compiled
        for kind, widths in binary.widths.items()
        if case.hidden * case.dtype.itemsize % 16 == 0
        and max(widths) < VECTOR_BITS
        and not (kind == "store" and binary.kernel in STORE_SUMS)
    ]
    assert not narrow


def test_nothing_is_computed_in_bf16(compiled: Compiled) -> None:
    assert not [f"{case}, {binary.kernel} on {binary.target}" for case, binary in compiled if binary.bf16_arithmetic]


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
        f"{case}, {binary.kernel} on {binary.target}: {binary.registers} registers"
        for case, binary in compiled
        if not case.is_crowded and share_of_registers(binary.target, binary.num_warps, binary.registers) >= 0.5
    ]


def test_nvidias_targets_take_alike_and_some_launches_are_crowded() -> None:
    for row in rows():
        taken = [row[target]["registers"] for target in LIMITS]
        assert max(taken) < 2 * min(taken), row["case"]
    assert recorded()["norm_backward, layer, weight, bias: 4097 x bfloat16"] >= 1.0
