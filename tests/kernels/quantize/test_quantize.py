"""Codes of 8 bits: how far they are from the tensor, what they do at the edges, and that a fault shows."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import pad

from memopt.kernels.quantize import quantize as room
from memopt.kernels.quantize.layout import GROUP, LEVELS, Quantized
from memopt.kernels.quantize.quantize import dequantize, quantize

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SIZES = [1, 2, 3, 127, 128, 129, 255, 257, 1000, 4096]

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def draw(count: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return (torch.randn(count, generator=generator, dtype=torch.float64) * scale + shift).to(dtype)


def by_group(x: Tensor) -> Tensor:
    """(groups, 128) in fp64; the last element again in what is left of the last group."""
    return pad(x.double()[None], (0, -x.numel() % GROUP), "replicate").view(-1, GROUP)


def steps(x: Tensor) -> Tensor:
    """The exact step of every element's group."""
    groups = by_group(x)
    step = (groups.amax(1) - groups.amin(1)) / LEVELS
    return step.repeat_interleave(GROUP)[: x.numel()]


def worst_error(x: Tensor, quantized: Quantized) -> float:
    """The largest error in steps, beyond one rounding to the dtype of x and the rounding of fp32 (fp64) arithmetic."""
    decoded = dequantize(quantized)
    assert decoded.dtype == x.dtype
    assert decoded.shape == x.shape
    largest = by_group(x).abs().amax(1).repeat_interleave(GROUP)[: x.numel()]
    limits = torch.finfo(x.dtype)
    rounding = (limits.eps * decoded.double().abs()).clamp(min=limits.smallest_normal * limits.eps) / 2
    rounding += 4 * torch.finfo(quantized.scales.dtype).eps * largest
    error = (decoded.double() - x.double()).abs() - rounding
    return float((error.clamp(min=0) / steps(x)).nan_to_num(0.0).max())


@every_dtype
@pytest.mark.parametrize("count", SIZES)
def test_no_element_is_off_by_more_than_a_step(count: int, dtype: torch.dtype) -> None:
    for x in (draw(count, dtype), draw(count, dtype, scale=1e-3, shift=5.0), draw(count, dtype, scale=1e-4)):
        assert worst_error(x, quantize(x, seed=3)) <= 1


def test_errors_are_as_large_as_rounding_at_random_makes_them() -> None:
    x = draw(2**14)
    error = (dequantize(quantize(x, seed=1)) - x).double() / steps(x)
    assert float(error.square().mean()) == pytest.approx(1 / 6, rel=0.1)


@every_dtype
def test_a_code_takes_a_byte_and_scales_are_those_of_the_groups(dtype: torch.dtype) -> None:
    x = draw(1001, dtype)
    quantized = quantize(x, seed=3)
    groups = by_group(x)
    assert (quantized.codes.dtype, quantized.codes.shape, quantized.dtype) == (torch.uint8, (1001,), dtype)
    assert quantized.scales.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(quantized.scales[:, 0].double(), groups.amin(1))
    torch.testing.assert_close(
        quantized.scales[:, 1].double() * LEVELS, groups.amax(1) - groups.amin(1), rtol=1e-6, atol=0
    )


def unbiased(x: Tensor, seeds: list[int]) -> bool:
    """Whether the mean over `seeds` is x, within five standard deviations of the mean of as many fair roundings."""
    mean = torch.stack([dequantize(quantize(x, seed)).double() for seed in seeds]).mean(0)
    step = steps(x)
    up = ((x.double() - by_group(x).amin(1).repeat_interleave(GROUP)[: x.numel()]) / step) % 1
    deviation = ((up * (1 - up)).sqrt() * step / len(seeds) ** 0.5).clamp(min=1e-5)
    total = float((mean - x.double()).sum() / deviation.square().sum().sqrt())
    return bool(((mean - x.double()).abs() < 5 * deviation).all()) and abs(total) < 5


def test_the_mean_over_seeds_is_the_tensor() -> None:
    x = draw(3 * GROUP + 17)
    assert unbiased(x, list(range(500)))
    assert not unbiased(x, [1] * 500)


def test_a_seed_gives_the_same_codes_again_and_another_seed_others() -> None:
    x = draw(1000)
    codes = [quantize(x, seed).codes for seed in (1, 1, 2, 2**32 + 1, 0)]
    assert torch.equal(codes[0], codes[1])
    for i in range(1, len(codes)):
        assert not any(torch.equal(codes[i], other) for other in codes[i + 1 :])


def test_equal_elements_are_rounded_independently() -> None:
    groups = torch.full((64, GROUP), 0.5)
    groups[:, 0], groups[:, 1] = 0.0, 1.0  # a half lies in the middle of a step of 1/255
    up = dequantize(quantize(groups.view(-1), seed=1)).view(64, GROUP)[:, 2:] > 0.5
    assert 0.45 < up.double().mean() < 0.55
    assert up.double().mean(0).std() < 3 * 0.5 / 64**0.5
    assert up.double().mean(1).std() < 3 * 0.5 / GROUP**0.5
    assert len(up.unique(dim=0)) == 64
    assert len(up.unique(dim=1).t()) == GROUP - 2


def test_an_outlier_costs_its_own_group_only() -> None:
    x = draw(4 * GROUP)
    with_outlier = x.clone()
    with_outlier[GROUP + 3] = 1e4
    before, after = (dequantize(quantize(t, seed=1)).view(4, GROUP) for t in (x, with_outlier))
    assert torch.equal(before[[0, 2, 3]], after[[0, 2, 3]])
    assert not torch.equal(before[1], after[1])


@every_dtype
@pytest.mark.parametrize("value", [0.0, -0.0, 3.1415926, -1e-7, 6e4])
def test_a_constant_group_decodes_to_itself(value: float, dtype: torch.dtype) -> None:
    x = torch.full((GROUP + 5,), value, dtype=dtype)
    assert torch.equal(dequantize(quantize(x, seed=5)), x)


@every_dtype
def test_an_empty_tensor_stays_empty(dtype: torch.dtype) -> None:
    quantized = quantize(torch.empty(0, dtype=dtype), seed=1)
    assert (quantized.codes.shape, quantized.scales.shape) == ((0,), (0, 2))
    assert dequantize(quantized).shape == (0,)
    assert dequantize(quantized).dtype == dtype


@every_dtype
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_makes_its_whole_group_nan_and_no_other(value: float, dtype: torch.dtype) -> None:
    x = draw(3 * GROUP - 1, dtype)
    for place in (0, GROUP + 7, x.numel() - 1):
        poisoned = x.clone()
        poisoned[place] = value
        decoded = dequantize(quantize(poisoned, seed=5))
        own = torch.arange(x.numel()) // GROUP == place // GROUP
        assert decoded[own].isnan().all()
        assert torch.equal(decoded[~own], dequantize(quantize(x, seed=5))[~own])


def test_a_group_that_is_infinite_throughout_is_nan() -> None:
    for value in (math.inf, -math.inf, math.nan):
        assert dequantize(quantize(torch.full((GROUP,), value), seed=3)).isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_range_that_overflows_is_nan_and_the_largest_that_does_not_is_right_or_nan(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor([-largest, 1.0, largest], dtype=dtype)
    assert dequantize(quantize(x, seed=5)).isnan().all()
    for x in (torch.tensor([0.0, largest / 2, largest], dtype=dtype), torch.tensor([largest, largest], dtype=dtype)):
        decoded = dequantize(quantize(x, seed=5))
        off = (decoded / largest - x / largest).abs()
        assert decoded.isnan().all() or off.max() <= 1 / LEVELS + torch.finfo(dtype).eps


def test_fp64_keeps_a_range_beyond_fp32() -> None:
    x = draw(500, torch.float64, scale=1e200)
    assert worst_error(x, quantize(x, seed=3)) <= 1 + 1e-9
    tiny = draw(500, torch.float64, scale=1e-200, shift=0.0)
    assert worst_error(tiny, quantize(tiny, seed=1)) <= 1


@every_dtype
def test_the_smallest_numbers_of_each_dtype_are_distinguished(dtype: torch.dtype) -> None:
    x = torch.arange(100, dtype=torch.float64).mul(torch.finfo(dtype).tiny).to(dtype)
    assert worst_error(x, quantize(x, seed=3)) <= 1 + 1e-3


def test_large_tensors_are_worked_on_in_parts_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    x = draw(2 * GROUP * 3 + 77)
    whole = quantize(x, seed=5)
    decoded = dequantize(whole)
    monkeypatch.setattr(room, "_CHUNK", 2 * GROUP)
    in_parts = quantize(x, seed=5)
    assert torch.equal(in_parts.codes, whole.codes)
    assert torch.equal(in_parts.scales, whole.scales)
    assert torch.equal(dequantize(whole), decoded)


def test_the_largest_element_is_clamped_where_its_quotient_comes_out_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.stack((torch.zeros(200), torch.linspace(1, 2, 200)), 1)
    above = x[:, 1] / (x[:, 1] / torch.full((200,), 255.0)) > 255
    assert above.any(), "no example left"
    # The smallest number that can be drawn rounds everything up.
    monkeypatch.setattr(room, "uniform", lambda index, seed: torch.zeros(index.shape))
    for pair in x[above]:
        assert quantize(pair, seed=0).codes.tolist() == [0, 255]


def test_a_forgotten_minimum_would_be_noticed() -> None:
    x = draw(1000)
    quantized = quantize(x, seed=1)
    scales = quantized.scales.clone()
    scales[:, 0] = 0
    assert worst_error(x, dataclasses.replace(quantized, scales=scales)) > 1


def test_a_code_that_wraps_around_would_be_noticed() -> None:
    x = draw(1000)
    quantized = quantize(x, seed=1)
    codes = quantized.codes.where(quantized.codes < 255, 0)
    assert worst_error(x, dataclasses.replace(quantized, codes=codes)) > 200


def test_scales_of_the_neighbouring_group_would_be_noticed() -> None:
    x = draw(1000)
    quantized = quantize(x, seed=1)
    assert worst_error(x, dataclasses.replace(quantized, scales=quantized.scales.roll(1, 0))) > 1


def test_nothing_of_the_original_is_kept_or_changed() -> None:
    x = draw(300).requires_grad_()
    before = x.detach().clone()
    quantized = quantize(x, seed=1)
    decoded = dequantize(quantized)
    with torch.no_grad():
        assert torch.equal(x, before)
        x.zero_()
    assert torch.equal(dequantize(quantized), decoded)
    assert not any(t.requires_grad for t in (quantized.codes, quantized.scales, decoded))


def test_fake_tensors_have_the_shapes_of_real_ones() -> None:
    real = quantize(draw(301), seed=1)
    with FakeTensorMode():
        fake = quantize(torch.empty(301), seed=1)
        decoded = dequantize(fake)
    for name in ("codes", "scales"):
        ours, theirs = getattr(fake, name), getattr(real, name)
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    assert (decoded.shape, decoded.dtype) == ((301,), torch.float32)


@pytest.mark.parametrize(
    "x",
    [torch.zeros(2, 2), torch.zeros(8)[::2], torch.zeros(4, dtype=torch.int64), torch.zeros(4).to(torch.float8_e4m3fn)],
    ids=["two dimensions", "strided", "integers", "fp8"],
)
def test_other_tensors_are_refused(x: Tensor) -> None:
    with pytest.raises(ValueError, match="must be"):
        quantize(x, seed=1)
