"""The arithmetic of folds against exact rational arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from memopt.checkpoint import arithmetic
from memopt.checkpoint.arithmetic import RangeChanges
from memopt.checkpoint.tiles import tiles
from tests.checkpoint.folding import bits, fold_bias, fold_weight, round_once, scale_of

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def exact_rounding(value: Fraction, dtype: torch.dtype) -> float:
    """`value` rounded to nearest even in `dtype`, by integer arithmetic."""
    if value == 0:
        return 0.0
    info = torch.finfo(dtype)
    digits = 1 - round(math.log2(info.eps))
    exponent = max(math.floor(math.log2(abs(value))), round(math.log2(info.tiny)))
    while abs(value) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    quantum = Fraction(2) ** (exponent - digits + 1)
    rounded = round(value / quantum) * quantum  # Python rounds fractions to even
    return math.copysign(math.inf, rounded) if abs(rounded) > Fraction(info.max) else float(rounded)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return (values * torch.exp(2 * torch.randn(*shape, generator=generator, dtype=torch.float64))).to(dtype)


@pytest.mark.parametrize("gamma_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_folded_element_is_the_exact_product_rounded_once(dtype: torch.dtype, gamma_dtype: torch.dtype) -> None:
    weight, gamma = random(16, 8, dtype=dtype), random(8, dtype=gamma_dtype, seed=1)
    folded = fold_weight(weight, gamma)
    expected = [
        [exact_rounding(Fraction(w.item()) * Fraction(g.item()), dtype) for w, g in zip(row, gamma, strict=True)]
        for row in weight
    ]
    assert folded.dtype == dtype
    assert folded.double().tolist() == expected


def test_a_value_between_two_16_bit_numbers_is_not_rounded_twice() -> None:
    # Just above the tie between 1 and 1 + 2^-7; through fp32 it becomes the tie and goes to the even 1.
    value = torch.tensor([1 + 2**-8 + 2**-40], dtype=torch.float64)
    assert value.to(torch.bfloat16).item() == 1.0, "a cast rounds through fp32; if it stops, encode is simpler"
    assert round_once(value, torch.bfloat16).item() == 1 + 2**-7
    assert round_once(-value, torch.bfloat16).item() == -1 - 2**-7


@pytest.mark.parametrize("dtype", FLOATS)
def test_round_once_is_exact_over_the_whole_range(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    generator = torch.Generator().manual_seed(0)
    exponents = torch.empty(400, dtype=torch.float64).uniform_(
        math.log2(info.smallest_normal) - 30, math.log2(info.max) + 2, generator=generator
    )
    values = torch.exp2(exponents) * torch.sign(torch.randn(400, generator=generator, dtype=torch.float64))
    ties = 1 + torch.arange(9) * info.eps / 2
    values = torch.cat([values, ties, -ties])
    expected = [exact_rounding(Fraction(value), dtype) for value in values.tolist()]
    assert round_once(values, dtype).double().tolist() == expected


def test_round_once_keeps_zeros_infinities_and_nan() -> None:
    values = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan], dtype=torch.float64)
    rounded = round_once(values, torch.bfloat16).double()
    assert torch.equal(rounded.signbit()[:4], values.signbit()[:4])
    assert torch.equal(rounded[:4], values[:4])
    assert rounded[4].isnan()


def test_the_one_plus_weight_family_scales_by_one_plus_weight() -> None:
    weight, gamma = random(3, 4, dtype=torch.bfloat16), random(4, dtype=torch.bfloat16, seed=1)
    expected = (weight.double() * (1 + gamma.double())).to(torch.float32).to(torch.bfloat16)
    assert torch.equal(fold_weight(weight, gamma, offset=1), expected)


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_the_contracted_axis_is_the_one_that_is_scaled(axis: int) -> None:
    weight = random(3, 4, 5, dtype=torch.float32)
    gamma = random(weight.shape[axis], dtype=torch.float32, seed=1)
    folded = fold_weight(weight, gamma, axis=axis)
    moved = (weight.movedim(axis, -1).double() * gamma.double()).float()
    assert torch.equal(folded.movedim(axis, -1), moved)


def test_negative_channels_are_left_alone() -> None:
    weight, gamma = random(2, 4, dtype=torch.float32), torch.tensor([2.0, 3.0])
    folded = fold_weight(weight, gamma, channels=(1, -1, 0, -1))
    assert torch.equal(folded, weight * torch.tensor([3.0, 1.0, 2.0, 1.0]))


def test_scale_without_channels_is_offset_plus_gamma() -> None:
    assert scale_of(torch.tensor([0.5, -1.0]), 1, 2).tolist() == [1.5, 0.0]


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_folded_bias_is_the_exact_sum_rounded_once(dtype: torch.dtype) -> None:
    weight, beta, bias = random(6, 9, dtype=dtype), random(9, dtype=dtype, seed=1), random(6, dtype=dtype, seed=2)
    folded = fold_bias(bias, weight, beta)
    for row, start, result in zip(weight.tolist(), bias.tolist(), folded.tolist(), strict=True):
        products = (Fraction(w) * Fraction(b) for w, b in zip(row, beta.tolist(), strict=True))
        assert result == exact_rounding(Fraction(start) + sum(products), dtype)


def test_a_folded_bias_survives_cancellation() -> None:
    weight = torch.tensor([[1e8, 1.0, -1e8, 2**-20]])
    folded = fold_bias(torch.tensor([-1.0]), weight, torch.ones(4))
    assert folded.item() == 2**-20


def test_a_folded_bias_takes_the_constant_between_norm_and_linear() -> None:
    assert fold_bias(torch.tensor([1.0]), torch.tensor([[2.0]]), torch.tensor([3.0]), scale=0.5).item() == 4.0


def test_a_transposed_weight_folds_its_bias_along_rows() -> None:
    weight, beta = random(4, 3, dtype=torch.float32), random(4, dtype=torch.float32, seed=1)
    zero = torch.zeros(3)
    assert torch.equal(fold_bias(zero, weight, beta, axis=0), fold_bias(zero, weight.T.contiguous(), beta, axis=1))


def test_the_bias_of_a_convolution_takes_all_places_of_its_kernel() -> None:
    weight, beta = random(2, 3, 2, 2, dtype=torch.float32), random(3, dtype=torch.float32, seed=1)
    folded = fold_bias(torch.zeros(2), weight, beta, axis=1)
    expected = torch.einsum("oihw,i->o", weight.double(), beta.double())
    assert torch.allclose(folded.double(), expected, rtol=1e-7)


def test_experts_have_one_bias_each() -> None:
    weight, beta = random(3, 4, 5, dtype=torch.float32), random(5, dtype=torch.float32, seed=1)
    folded = fold_bias(torch.zeros(3, 4), weight, beta, axis=2)
    assert torch.allclose(folded.double(), weight.double() @ beta.double(), rtol=1e-6)


def test_large_tensors_give_the_same_result_as_their_rows() -> None:
    weight, gamma = random(40, 5000, dtype=torch.bfloat16), random(5000, dtype=torch.bfloat16, seed=1)
    rows = torch.stack([fold_weight(row[None], gamma)[0] for row in weight])
    assert torch.equal(fold_weight(weight, gamma), rows)


@pytest.mark.parametrize("shape", [(7, 5, 1), (1, 5, 7), (3, 4, 5), (2, 3, 50), (1, 1, 1), (0, 3, 2)])
@pytest.mark.parametrize("limit", [1, 4, 16, 1000])
def test_tiles_cover_every_element_once_in_order_and_in_one_piece(shape: tuple[int, int, int], limit: int) -> None:
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    pieces = [numbers[tile].reshape(-1) for tile in tiles(shape, limit)]
    assert all(len(piece) <= limit for piece in pieces)
    joined = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.long)
    assert torch.equal(joined, numbers.reshape(-1))


def test_range_changes_count_only_what_is_new() -> None:
    changes = RangeChanges()
    before = torch.tensor([1.0, 1.0, 1.0, 0.0, math.inf, 1.0], dtype=torch.float16)
    after = torch.tensor([math.inf, 0.0, 1e-7, 0.0, math.inf, math.nan], dtype=torch.float16)
    changes.count(bits(before), bits(after), "F16")
    assert (changes.infinities, changes.zeros, changes.subnormals) == (2, 1, 1)


def test_what_is_far_below_a_tie_decides_it() -> None:
    weight, bias = torch.tensor([[2.0**-8, 2.0**-40]]).bfloat16(), torch.ones(1).bfloat16()
    for sign in (1, -1):
        beta = torch.tensor([1.0, sign * 2.0**-40]).bfloat16()
        assert fold_bias(bias, weight, beta).item() == (1 + 2**-7 if sign > 0 else 1)


#: bf16 numbers of every exponent: exact powers of two, their neighbours, subnormals, infinities and NaN among them.
EDGES = np.concatenate([np.arange(0, 1 << 16, 128, dtype=np.uint16) + part for part in (0, 1, 0x2B, 0x3F, 0x40, 0x7F)])


def test_products_in_fp32_are_those_of_fp64_for_all_pairs_of_exponents() -> None:
    scale = arithmetic.decode(EDGES[EDGES <= 0x7F80], "BF16")
    weight = np.broadcast_to(EDGES[:, None, None], (len(EDGES), len(scale), 1))
    scaler, out = arithmetic.Scaler(scale, "BF16"), np.empty(weight.shape, np.uint16)
    assert scaler._in_single
    scaler(weight, slice(0, len(scale)), out)
    with np.errstate(all="ignore"):
        expected = arithmetic.encode(arithmetic.decode(weight, "BF16") * scale[None, :, None], "BF16")
    nan = (expected & 0x7FFF) > 0x7F80
    assert np.array_equal((out & 0x7FFF) > 0x7F80, nan)
    assert np.array_equal(out[~nan], expected[~nan])


def test_a_scale_of_more_than_8_bits_is_not_multiplied_in_fp32() -> None:
    weight = torch.linspace(1, 2, 129)[:-1].bfloat16()[:, None].expand(-1, 8192)
    gamma = torch.rand(8192, generator=torch.Generator().manual_seed(0)) + 0.5
    twice = (weight.float() * gamma).bfloat16()
    folded = fold_weight(weight, gamma)
    row, column = (twice != folded).nonzero()[0].tolist()  # a million products, of which one in 2^17 is rounded twice
    exact = Fraction(weight[row, column].item()) * Fraction(gamma[column].item())
    assert folded[row, column].item() == exact_rounding(exact, torch.bfloat16)
