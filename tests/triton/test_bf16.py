"""bf16 in the interpreter gives what PyTorch, and so a GPU, gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.triton.conftest import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="about the interpreter: TRITON_INTERPRET=1 pytest tests/triton")

N = 256
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [torch.add, torch.sub, torch.mul, torch.div]
COMPARISONS: list[Callable[[Tensor, Tensor], Tensor]] = [torch.lt, torch.le, torch.gt, torch.ge, torch.eq, torch.ne]


@triton.jit
def cast_kernel(x, y, N: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(y + offsets, tl.load(x + offsets).to(y.dtype.element_ty))


@triton.jit
def implicit_cast_kernel(x, y, N: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(y + offsets, tl.load(x + offsets))


@triton.jit
def truncating_kernel(x, y, N: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(y + offsets, tl.load(x + offsets).to(tl.bfloat16, fp_downcast_rounding="rtz"))


@triton.jit
def binary_kernel(a, b, y, OP: tl.constexpr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    left, right = tl.load(a + offsets), tl.load(b + offsets)
    if OP == 0:
        result = left + right
    elif OP == 1:
        result = left - right
    elif OP == 2:
        result = left * right
    else:
        result = left / right
    tl.store(y + offsets, result)


@triton.jit
def comparison_kernel(a, b, y, OP: tl.constexpr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    left, right = tl.load(a + offsets), tl.load(b + offsets)
    if OP == 0:
        result = left < right
    elif OP == 1:
        result = left <= right
    elif OP == 2:
        result = left > right
    elif OP == 3:
        result = left >= right
    elif OP == 4:
        result = left == right
    else:
        result = left != right
    tl.store(y + offsets, result.to(tl.int8))


@triton.jit
def unary_kernel(x, y, OP: tl.constexpr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    value = tl.load(x + offsets)
    if OP == 0:
        result = -value
    elif OP == 1:
        result = tl.abs(value)
    elif OP == 2:
        result = tl.where(value > 0.5, value, 0.0)
    else:
        result = value * 3.0 + 1.0
    tl.store(y + offsets, result)


@triton.jit
def maximum_kernel(x, y, N: tl.constexpr):
    tl.store(y, tl.max(tl.load(x + tl.arange(0, N)), axis=0))


@triton.jit
def sum_kernel(x, y, N: tl.constexpr):
    tl.store(y, tl.sum(tl.load(x + tl.arange(0, N)), axis=0))


@triton.jit
def dot_kernel(a, b, y, N: tl.constexpr):
    offsets = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(y + offsets, tl.dot(tl.load(a + offsets), tl.load(b + offsets)))


def some_bf16() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, N, generator=generator).mul(4).bfloat16()
    b[::5] = a[::5]  # equal values, for the comparisons
    a[3], b[7], a[11], b[13] = float("nan"), float("nan"), float("inf"), 0.0
    return a, b


def same(got: Tensor, wanted: Tensor) -> bool:
    return torch.equal(got.isnan(), wanted.isnan()) and torch.equal(got.nan_to_num(0), wanted.nan_to_num(0))


@pytest.mark.parametrize("kernel", [cast_kernel, implicit_cast_kernel], ids=["explicit", "implicit"])
def test_every_pattern_of_the_dropped_bits_rounds_to_nearest_even_as_in_torch(kernel: triton.JITFunction) -> None:
    low = torch.arange(2**16, dtype=torch.int32)
    # 1.0 and its odd neighbour, the largest number below infinity, a subnormal, and their negatives.
    for high in (0x3F80, 0x3F81, 0x7F7F, 0x0001, 0x0000):
        for sign in (0, -(2**31)):
            x = (low + ((high << 16) + sign)).view(torch.float32)
            y = torch.empty(2**16, dtype=torch.bfloat16)
            kernel[(1,)](x, y, N=2**16)
            assert torch.equal(y.view(torch.int16), x.bfloat16().view(torch.int16))


def test_nan_stays_nan_and_infinity_stays_infinity() -> None:
    patterns = [0x7F800000, 0x7F800001, 0x7FFFFFFF, 0x7FC00000, -0x800000, -0x7FFFFF, -1, 0]
    x = torch.tensor(patterns, dtype=torch.int32).view(torch.float32)
    y = torch.empty(8, dtype=torch.bfloat16)
    cast_kernel[(1,)](x, y, N=8)
    assert same(y, x.bfloat16())


def test_every_bf16_number_survives_the_way_to_fp32_and_back() -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    wide, narrow = torch.empty(2**16, dtype=torch.float32), torch.empty(2**16, dtype=torch.bfloat16)
    cast_kernel[(1,)](x, wide, N=2**16)
    cast_kernel[(1,)](wide, narrow, N=2**16)
    assert same(wide, x.float())
    assert same(narrow, x)


def test_rounding_towards_zero_can_still_be_chosen() -> None:
    x = torch.full((16,), 1.0 + 2**-8 + 2**-9)
    y = torch.empty(16, dtype=torch.bfloat16)
    truncating_kernel[(1,)](x, y, N=16)
    assert (y == 1.0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.int32], ids=["fp16", "int32"])
def test_other_types_convert_by_way_of_fp32(dtype: torch.dtype) -> None:
    x = torch.arange(-128, 128, dtype=torch.float32).mul(3).to(dtype)
    y, back = torch.empty(N, dtype=torch.bfloat16), torch.empty(N, dtype=dtype)
    cast_kernel[(1,)](x, y, N=N)
    cast_kernel[(1,)](y, back, N=N)
    assert torch.equal(y, x.bfloat16())
    assert torch.equal(back, x.bfloat16().to(dtype))


@pytest.mark.parametrize("op", range(len(BINARY)), ids=[op.__name__ for op in BINARY])
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
def test_arithmetic_is_that_of_torch(op: int) -> None:
    a, b = some_bf16()
    y = torch.empty(N, dtype=torch.bfloat16)
    binary_kernel[(1,)](a, b, y, OP=op, N=N)
    assert same(y, BINARY[op](a, b))


@pytest.mark.parametrize("op", range(len(COMPARISONS)), ids=[op.__name__ for op in COMPARISONS])
def test_comparisons_are_those_of_torch(op: int) -> None:
    a, b = some_bf16()
    y = torch.empty(N, dtype=torch.int8)
    comparison_kernel[(1,)](a, b, y, OP=op, N=N)
    assert torch.equal(y.bool(), COMPARISONS[op](a, b))


@pytest.mark.parametrize("op", range(4), ids=["negate", "abs", "where", "with Python numbers"])
def test_operations_on_one_tensor_are_those_of_torch(op: int) -> None:
    x, _ = some_bf16()
    y = torch.empty(N, dtype=torch.bfloat16)
    unary_kernel[(1,)](x, y, OP=op, N=N)
    wanted = [-x, x.abs(), torch.where(x > 0.5, x, torch.zeros_like(x)), x * 3.0 + 1.0]
    assert same(y, wanted[op])


def test_a_maximum_is_that_of_the_values() -> None:
    x, largest = torch.arange(N).sub(100).bfloat16(), torch.empty(1)
    maximum_kernel[(1,)](x, largest, N=N)
    assert largest.item() == x.double().max().item()


def test_a_sum_that_would_round_at_every_step_is_refused() -> None:
    with pytest.raises(Exception, match=r"convert to tl\.float32"):
        sum_kernel[(1,)](torch.ones(N, dtype=torch.bfloat16), torch.empty(N), N=N)


def test_a_dot_product_accumulates_in_fp32() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 32, 32, generator=generator).bfloat16()
    y = torch.empty(32, 32)
    dot_kernel[(1,)](a, b, y, N=32)
    assert torch.allclose(y.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)
