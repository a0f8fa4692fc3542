"""What the compiler makes of the dropout kernel: no spills, whole vectors, and no random number but what is needed."""

from __future__ import annotations

import pytest
import torch

from memopt.kernels.dropout.function_triton import launch_dropout
from tests.aot.cases import BACKENDS
from tools.kernels.aot import SHARED_LIMIT, TARGETS, Binary, capture

DTYPES = [torch.bfloat16, torch.float32]
#: A whole number of tiles, a whole number of vectors, neither.
SIZES = [2**20, 2**20 + 128 * 3, 2**20 + 3]
SEED, THRESHOLD, SCALE = 2**62, 0.25, 4 / 3


@pytest.fixture(scope="module", params=TARGETS)
def compiled(request: pytest.FixtureRequest) -> list[tuple[bool, Binary]]:
    """Whether vectors are to be expected, and the binary, of every launch."""
    found = []
    for dtype in DTYPES:
        flat = [torch.empty(count, dtype=dtype, device="meta") for count in SIZES]
        rows = [torch.empty(64, 2 * hidden, dtype=dtype, device="meta")[:, hidden:] for hidden in (4096, 4000, 1001)]
        for x in (*flat, *rows):
            with capture(request.param) as binaries:
                launch_dropout(x, SEED, THRESHOLD, SCALE)
            (binary,) = binaries
            found.append((x.size(-1) % 16 == 0, binary))
    return found


def test_nothing_spills_and_shared_memory_is_within_the_limit(compiled: list[tuple[bool, Binary]]) -> None:
    assert not [binary.kernel for _, binary in compiled if binary.spilled]
    assert all(binary.shared <= SHARED_LIMIT[binary.target] for _, binary in compiled)


def test_the_tensor_is_read_and_written_in_whole_vectors(compiled: list[tuple[bool, Binary]]) -> None:
    for in_vectors, binary in compiled:
        if in_vectors:
            assert {max(widths) for widths in binary.widths.values()} == {128}


def test_nothing_is_computed_in_bf16(compiled: list[tuple[bool, Binary]]) -> None:
    assert not any(binary.bf16_arithmetic for _, binary in compiled)


def test_registers_leave_room_for_enough_warps_to_hide_memory(compiled: list[tuple[bool, Binary]]) -> None:
    # 64 registers a thread fill half of a multiprocessor's warps on every target.
    assert max(binary.registers for _, binary in compiled) <= 64


@pytest.mark.parametrize("target", BACKENDS)
def test_another_seed_probability_or_size_does_not_compile_again(target: str) -> None:
    with capture(target) as binaries:
        for count, seed, threshold, scale in ((2**20, 1, 0.5, 2.0), (2**20, 16, 0.25, 4 / 3), (2**21, 2**30, 1.0, 0.0)):
            launch_dropout(torch.empty(count, dtype=torch.bfloat16, device="meta"), seed, threshold, scale)
    assert len({id(binary.asm) for binary in binaries}) == 1
