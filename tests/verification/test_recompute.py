"""The second opinion on folds: its rounding and sums against exact arithmetic, and against the writer's."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from memopt.verification.recompute import decode, is_rounded_product, round_product, round_sum
from tests.checkpoint.folding import round_once

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def values(dtype: torch.dtype) -> torch.Tensor:
    """Numbers over the whole range of a dtype, with all ties around some of them."""
    info = torch.finfo(dtype)
    generator = torch.Generator().manual_seed(0)
    low, high = math.log2(info.smallest_normal) - 26, math.log2(info.max) + 1
    spread = torch.exp2(torch.empty(5000, dtype=torch.float64).uniform_(low, high, generator=generator))
    around_one = 1 + torch.arange(-64, 64, dtype=torch.float64) * info.eps / 4
    tiny = torch.arange(20, dtype=torch.float64) * info.smallest_normal * info.eps / 2
    special = torch.tensor([0.0, math.inf, info.max, info.max * (1 + info.eps / 4), info.max * (1 + info.eps)])
    every = torch.cat([spread, around_one, tiny, special.double()])
    return torch.cat([every, -every])


@pytest.mark.parametrize("name", DTYPES)
def test_all_roundings_agree_everywhere(name: str) -> None:
    numbers = values(DTYPES[name])
    expected = round_once(numbers, DTYPES[name]).double()
    zero = torch.zeros_like(numbers).numpy()
    for rounded in (round_product(numbers.numpy(), name), round_sum(numbers.numpy(), zero, name)):
        got = torch.from_numpy(rounded)
        assert torch.equal(got, expected)
        assert torch.equal(got.signbit(), expected.signbit())


def test_a_tie_is_broken_by_what_lies_below() -> None:
    tie = np.array([1 + 2.0**-8] * 3)
    low = np.array([-(2.0**-70), 0.0, 2.0**-70])
    assert round_sum(tie, low, "BF16").tolist() == [1.0, 1.0, 1 + 2.0**-7]
    assert round_sum(-tie, -low, "BF16").tolist() == [-1.0, -1.0, -1 - 2.0**-7]


def test_nan_stays_nan() -> None:
    nan = np.array([math.nan])
    assert np.isnan(round_product(nan, "F16")).all()
    assert np.isnan(round_sum(nan, nan, "F16")).all()


@pytest.mark.parametrize("name", DTYPES)
def test_decoding_is_exact(name: str) -> None:
    numbers = round_once(values(DTYPES[name]), DTYPES[name])
    raw = numbers.view(torch.uint8).numpy().tobytes()
    assert torch.equal(torch.from_numpy(decode(raw, name)), numbers.double())


def test_fractions_confirm_the_rounding() -> None:
    for number in (0.1, 1 / 3, 1e-39, 3e38, 5e-41):
        quantum = Fraction(2) ** (max(math.frexp(number)[1] - 1, -126) - 7)
        assert round_product(np.array([number]), "BF16")[0] == float(round(Fraction(number) / quantum) * quantum)


def test_bf16_products_are_accepted_only_where_each_is_the_nearest_and_ties_are_even() -> None:
    mantissas = torch.arange(1, 2, 2**-7).bfloat16()
    before, scale = (
        mantissas[:, None].expand(-1, 128).contiguous(),
        mantissas.float() * torch.tensor([-1.0, 1.0]).repeat(64),
    )
    after = (before.double() * scale.double()).bfloat16()  # exact products of 16 bits, every tie among them
    scale = scale.bfloat16()
    bits = [tensor.view(torch.int16).numpy() for tensor in (before, after)]
    assert is_rounded_product(bits[0], bits[1], scale)
    for row, column in list(np.ndindex(128, 128))[::7]:
        for other in (bits[1][row, column] - 1, bits[1][row, column] + 1, bits[1][row, column] ^ np.int16(-0x8000)):
            block = np.array([[other]], dtype=np.int16)
            assert not is_rounded_product(bits[0][row : row + 1, :1], block, scale[column : column + 1])


@pytest.mark.parametrize("result", [0.0, 2.0**-127, math.inf, math.nan])
def test_bf16_products_that_left_the_normal_range_are_looked_at_in_fp64(result: float) -> None:
    one, value = torch.ones(1).bfloat16(), torch.tensor([result]).bfloat16()
    bits = [tensor.view(torch.int16).numpy() for tensor in (one, value)]
    assert not is_rounded_product(bits[0], bits[1], value)
