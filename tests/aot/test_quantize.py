"""What the compiler makes of the kernels that quantize: no spills, whole vectors, and the reference's arithmetic."""

from __future__ import annotations

import re

import pytest
import torch

from memopt.kernels.quantize.quantize_triton import launch_dequantize, launch_quantize
from tests.aot.cases import BACKENDS, WHOLE, dealt
from tools.kernels.aot import SHARED_LIMIT, Binary, capture

#: A whole number of tiles, a whole number of vectors, neither.
SIZES = [2**20, 2**20 + 128 * 3, 2**20 + 3]
DTYPES = [torch.bfloat16, torch.float32]


@pytest.fixture(scope="module", params=WHOLE)
def whole(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(scope="module")
def compiled(whole: bool) -> list[tuple[int, Binary]]:
    """The number of elements and the binary of launches."""
    found: list[tuple[int, Binary]] = []
    calls = dealt(
        [(dtype, count) for dtype in DTYPES for count in SIZES],
        whole=whole,
        everywhere=lambda call: call == (torch.bfloat16, SIZES[0]),
    )
    for (dtype, count), target in calls:
        with capture(target) as binaries:
            x = torch.empty(count, dtype=dtype, device="meta")
            launch_dequantize(*launch_quantize(x, 2**62), dtype)
        assert len(binaries) == 2
        found += [(count, binary) for binary in binaries]
    return found


def test_nothing_spills_and_shared_memory_is_within_the_limit(compiled: list[tuple[int, Binary]]) -> None:
    assert not [(count, binary.target) for count, binary in compiled if binary.spilled]
    assert all(binary.shared <= SHARED_LIMIT[binary.target] for _, binary in compiled)


def test_the_tensor_is_read_and_written_in_whole_vectors(compiled: list[tuple[int, Binary]]) -> None:
    for count, binary in compiled:
        if count % 128 == 0:
            of_tensor = "load" if binary.kernel == "quantize_kernel" else "store"
            assert max(binary.widths[of_tensor]) == 128, (count, binary.kernel)


def test_products_are_not_fused_with_sums_and_quotients_are_exact(compiled: list[tuple[int, Binary]]) -> None:
    for _, binary in compiled:
        ptx = binary.asm.get("ptx")
        if ptx is not None:
            # The smallest numbers are kept, except by the floor of a position, which is 0 for them in any case.
            ptx = ptx.replace("cvt.rmi.ftz.f32.f32", "")
            assert not re.findall(r"\bfma\.|\bmad\.\S*f32|div\.(?:full|approx)|\.ftz", ptx), binary.kernel
            assert ("div.rn.f32" in ptx) == (binary.kernel == "quantize_kernel")
        elif binary.kernel == "dequantize_kernel":  # AMD's exact quotient is a chain of fused operations
            assert not re.findall(r"\bv_(?:pk_)?(?:fma|mad|fmac|mac)\w*_f32", binary.asm["amdgcn"])


def test_nothing_is_computed_in_bf16(compiled: list[tuple[int, Binary]]) -> None:
    assert not any(binary.bf16_arithmetic for _, binary in compiled)


@pytest.mark.parametrize("target", BACKENDS)
def test_another_seed_or_size_does_not_compile_again(target: str) -> None:
    with capture(target) as binaries:
        for count, seed in ((2**20, 1), (2**20, 16), (2**20, 12345), (2**21, 2**30)):
            launch_quantize(torch.empty(count, dtype=torch.bfloat16, device="meta"), seed)
    assert len({id(binary.asm) for binary in binaries}) == 1
