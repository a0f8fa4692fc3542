"""What the compiler makes of the kernels of the codes: for every target, without spills, in whole vectors."""

from __future__ import annotations

import pytest
import torch

from memopt.kernels.derivative_codes.codes import derivative_code
from memopt.kernels.derivative_codes.codes_triton import launch_apply, launch_encode
from memopt.kernels.derivative_codes.schemes import RELU_MASK
from tests.aot.cases import WHOLE, dealt
from tools.kernels.aot import SHARED_LIMIT, Binary, capture

CODES = [("relu", "mask"), ("gelu_erf", "published"), ("silu", "3bit"), ("mish", "4bit"), ("mish", "8bit")]
#: Whole groups, whole vectors, neither.
SIZES = [2**20, 2**20 + 16 * 3, 2**20 + 3]
CASES = [(SIZES[0], torch.bfloat16), (SIZES[1], torch.bfloat16), (SIZES[2], torch.bfloat16), (SIZES[0], torch.float32)]

Compiled = list[tuple[int, torch.dtype, Binary]]


@pytest.fixture(scope="module", params=WHOLE)
def whole(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(scope="module", params=CODES, ids="-".join)
def compiled(request: pytest.FixtureRequest, whole: bool) -> Compiled:
    """Launches of one code, with their number of elements and dtype; the last tensors are of rows."""
    kind, scheme = request.param
    code, found = RELU_MASK if scheme == "mask" else derivative_code(kind, scheme), []
    tensors = [torch.empty(count, dtype=dtype, device="meta") for count, dtype in CASES]
    tensors.append(torch.empty(2**10, 2**11, dtype=torch.bfloat16, device="meta")[:, 2**10 :])
    is_heaviest, first = scheme == "8bit", CODES.index(request.param)
    for z, target in dealt(tensors, whole=whole, first=first, everywhere=lambda _: is_heaviest):
        with capture(target) as binaries:
            launch_apply(z, launch_encode(z, code), code)
        assert [binary.kernel for binary in binaries] == ["encode_kernel", "apply_kernel"]
        found += [(z.numel(), z.dtype, binary) for binary in binaries]
    return found


def test_nothing_spills_and_shared_memory_is_within_the_limit(compiled: Compiled) -> None:
    assert not [(count, str(dtype), binary.target) for count, dtype, binary in compiled if binary.spilled]
    assert all(binary.shared <= SHARED_LIMIT[binary.target] for _, _, binary in compiled)


def test_the_tensor_is_read_and_written_in_whole_vectors(compiled: Compiled) -> None:
    for count, dtype, binary in compiled:
        if count % 16 == 0:
            # ROCm's launches have half as many warps, of twice as many threads; compiled from here they do not.
            width = 64 if binary.target == "gfx942" and dtype.itemsize == 2 else 128
            assert max(binary.widths["load"]) == width
            if binary.kernel == "apply_kernel":
                assert max(binary.widths["store"]) == width


def test_nothing_is_computed_in_16_bits(compiled: Compiled) -> None:
    assert not [binary.kernel for _, _, binary in compiled if binary.bf16_arithmetic]
