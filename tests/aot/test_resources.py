"""What the compiled kernels take, through their real launchers, on four GPUs that need not be there."""

from __future__ import annotations

import pytest

from memopt.kernels.tools.aot import SHARED_LIMIT, Binary
from memopt.kernels.tools.launches import VARIANTS
from tests.aot.cases import WHOLE, Case, binaries, cases, dealt

VECTOR_BITS = 128

#: Kernel in the launch table, size -> bytes that a thread may spill there.
MAY_SPILL = {
    # No model has an odd hidden size. Its rows are read element by element, which takes more registers than whole
    # vectors do, and a tile of 8192 has none to spare. Smaller tiles would read models' rows (4096 + 16 n) twice.
    ("norm_backward", 4097): 160,
}
#: Kernels that store nothing but sums: one number in some hundred, so its width does not matter.
STORE_SUMS = {"norm_long_sums_kernel", "loss_forward_kernel"}

Compiled = list[tuple[Case, Binary]]


@pytest.fixture(scope="module", params=WHOLE)
def whole(request: pytest.FixtureRequest) -> bool:
    return request.param


# One fixture value at a time: pytest runs the tests of a variant side by side, and compiles it once.
@pytest.fixture(scope="module", params=range(len(VARIANTS)), ids=[str(variant) for variant in VARIANTS])
def compiled(request: pytest.FixtureRequest, whole: bool) -> Compiled:
    """Launches of one variant."""
    chosen = dealt(
        cases(VARIANTS[request.param]), whole=whole, first=request.param, everywhere=lambda case: case.is_heaviest
    )
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
