"""What the compiled kernels take, through their real launchers, on four GPUs that need not be there."""

from __future__ import annotations

import pytest

from memopt.kernels.tools.aot import SHARED_LIMIT, TARGETS, Binary
from memopt.kernels.tools.launches import VARIANTS
from tests.aot.cases import Case, binaries, cases

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


# One fixture value at a time: pytest runs the tests of a variant and target side by side, and compiles it once.
@pytest.fixture(
    scope="module",
    params=[(variant, target) for variant in VARIANTS for target in TARGETS],
    ids=lambda pair: f"{pair[0]}-{pair[1]}",
)
def compiled(request: pytest.FixtureRequest) -> Compiled:
    """Every launch of one variant, compiled for one target."""
    variant, target = request.param
    return [(case, binary) for case in cases(variant) for binary in binaries(case, target)]


def test_no_kernel_spills_registers(compiled: Compiled) -> None:
    assert not [
        f"{case}, {binary.kernel}: {binary.spilled} bytes"
        for case, binary in compiled
        if binary.spilled > MAY_SPILL.get((case.variant.kernel, case.hidden), 0)
    ]


def test_shared_memory_is_within_the_limit_of_a_block(compiled: Compiled) -> None:
    assert all(binary.shared <= SHARED_LIMIT[binary.target] for _, binary in compiled)


def test_rows_of_whole_vectors_are_read_and_written_in_vectors(compiled: Compiled) -> None:
    narrow = [
        f"{case}, {binary.kernel}: {kind}s of {sorted(set(widths))} bits"
        for case, binary in compiled
        for kind, widths in binary.widths.items()
        if case.hidden * case.dtype.itemsize % 16 == 0
        and max(widths) < VECTOR_BITS
        and not (kind == "store" and binary.kernel in STORE_SUMS)
    ]
    assert not narrow


def test_nothing_is_computed_in_bf16(compiled: Compiled) -> None:
    assert not [f"{case}, {binary.kernel}" for case, binary in compiled if binary.bf16_arithmetic]
