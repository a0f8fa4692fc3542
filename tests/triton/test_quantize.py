"""The kernels that quantize give the bytes of the PyTorch reference, and draw the random numbers of `counter`."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from memopt.kernels.base import counter, counter_triton
from memopt.kernels.quantize import quantize_triton
from memopt.kernels.quantize.layout import GROUP
from memopt.kernels.quantize.quantize import _dequantize, _quantize, dequantize, quantize
from memopt.kernels.quantize.quantize_triton import launch_dequantize, launch_quantize
from tests.triton.conftest import DEVICE
from tests.triton.memory import RedZones

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TILE = quantize_triton.ROWS * GROUP
SEEDS = [0, 12345, 2**32 + 7, 2**64 - 1, -4]
draw_in_kernel = counter_triton.uniform

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy: 0 / 0, inf - inf
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def draw(count: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return (torch.randn(count, generator=generator, dtype=torch.float64) * scale + shift).to(DEVICE, dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit; a NaN is as good as another."""
    return bool((a.isnan() == b.isnan()).all()) and same_bits(a.nan_to_num(), b.nan_to_num())


def check(x: Tensor, seed: int) -> None:
    codes, scales = launch_quantize(x, seed)
    expected_codes, expected_scales = _quantize(x, seed)
    assert same_bits(codes, expected_codes)
    assert same(scales, expected_scales)
    decoded = launch_dequantize(codes, scales, x.dtype)
    assert same(decoded, _dequantize(codes, scales, x.dtype))


@triton.jit(do_not_specialize=["seed"])
def uniform_kernel(index_ptr, u_ptr, seed, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, COUNT)
    tl.store(u_ptr + place, draw_in_kernel(tl.load(index_ptr + place), seed))


@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1, 2**31, 2**32, 2**40 + 5, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**40)])
def test_random_numbers_in_a_kernel_are_those_outside(seed: int) -> None:
    far = torch.randint(0, 2**62, (512,), generator=torch.Generator().manual_seed(0))
    index = torch.cat((torch.arange(256), torch.arange(2**32 - 128, 2**32 + 128), far)).to(DEVICE)
    u = torch.empty(1024, device=DEVICE)
    uniform_kernel[(1,)](index, u, seed, COUNT=1024)
    assert same_bits(u, counter.uniform(index, seed))


@every_dtype
@pytest.mark.parametrize("seed", SEEDS, ids=str)
def test_bytes_are_those_of_the_reference(seed: int, dtype: torch.dtype) -> None:
    for scale, shift in ((1.0, 0.0), (1e-3, 7.0), (1e-6, 0.0), (200.0, -1000.0)):
        check(draw(TILE + 3 * GROUP + 5, dtype, scale, shift), seed)


@every_dtype
@pytest.mark.parametrize("count", [0, 1, 2, 127, 128, 129, TILE - 1, TILE, TILE + 1, 2 * TILE, 2 * TILE + 3 * GROUP])
def test_every_size_is_covered_to_its_last_element_and_not_further(
    count: int, dtype: torch.dtype, red_zones: RedZones
) -> None:
    x = red_zones.guard(draw(count, dtype))
    check(x, 3)


@every_dtype
def test_groups_with_special_values_are_those_of_the_reference(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    groups = draw(13 * GROUP, dtype).view(13, GROUP)
    groups[0, 5], groups[1, 7], groups[2, 0] = math.nan, math.inf, -math.inf
    groups[3], groups[4], groups[5] = 3.14, math.inf, math.nan
    groups[6, :2] = torch.tensor([-limits.max, limits.max])
    groups[7, 0] = limits.max
    groups[8] = 0.0
    groups[8, ::3] = -0.0
    groups[9] = groups[9].clamp(min=0) * -1
    groups[10] *= limits.smallest_normal
    groups[11] = torch.where(groups[11] > 0, limits.smallest_normal * limits.eps, 0.0)
    groups[12] = -0.0
    check(groups.view(-1), 3)


def test_the_largest_element_is_clamped_where_its_quotient_comes_out_too_large() -> None:
    candidates = torch.linspace(1, 2, 200, device=DEVICE)
    quotients = candidates / (candidates / torch.full_like(candidates, 255.0))
    x = torch.zeros(2**18, device=DEVICE)
    u = counter.uniform(torch.arange(len(x), device=DEVICE), 0)
    place = int(u.argmin())
    x[place] = candidates[quotients.argmax()]
    assert u[place] < quotients.max() - 255, "it is not rounded up"
    codes, _ = launch_quantize(x, 0)
    assert codes[place] == 255
    assert codes.sum(dtype=torch.int64) == 255


@every_dtype
def test_a_tensor_that_is_not_aligned_is_read_right(dtype: torch.dtype) -> None:
    check(draw(TILE + 200, dtype)[1:], 3)
    check(draw(2 * TILE, dtype)[3 : TILE + 3], 7)


@every_dtype
def test_the_public_functions_run_the_kernels(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    launched = []
    for launch in (launch_quantize, launch_dequantize):
        name = launch.__name__

        def recorded(*args: object, launch=launch, name=name) -> object:  # type: ignore[no-untyped-def]
            launched.append(name)
            return launch(*args)

        monkeypatch.setattr(quantize_triton, name, recorded)
    x = draw(500, dtype)
    decoded = dequantize(quantize(x, seed=1))
    assert launched == ["launch_quantize", "launch_dequantize"]
    assert same_bits(decoded, _dequantize(*_quantize(x, 1), dtype))


def test_fp64_is_for_the_reference() -> None:
    x = draw(500, torch.float64, scale=1e200)
    assert float((dequantize(quantize(x, seed=1)) - x).abs().max()) < 1e200 * 8 / 255
