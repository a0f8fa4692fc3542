"""Random numbers by index and seed: uniform, independent of each other, repeated by nothing but the same two."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memopt.kernels.base.counter import uniform

COUNT = 2**16
#: Of a correlation of COUNT independent pairs, in standard deviations: seen once in two million.
SIGMAS = 5
SEEDS = [0, 1, 2**31, 2**32, 2**63, 2**64 - 1]


def draw(seed: int = 0, first: int = 0) -> Tensor:
    return uniform(torch.arange(first, first + COUNT), seed)


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack((a.double(), b.double())))[0, 1])


@pytest.mark.parametrize("seed", SEEDS)
def test_numbers_are_uniform_in_zero_to_one(seed: int) -> None:
    u = draw(seed)
    assert u.dtype == torch.float32
    assert 0 <= u.min() < 1e-3
    assert 1 - 1e-3 < u.max() < 1
    counts = torch.histc(u, bins=256, min=0, max=1)
    chi_square = float(((counts - COUNT / 256).square() / (COUNT / 256)).sum())
    assert abs(chi_square - 255) < SIGMAS * (2 * 255) ** 0.5


@pytest.mark.parametrize("distance", [1, 2, 3, 64, 127, 128, 129, 1024])
def test_neighbours_are_independent(distance: int) -> None:
    u = draw(seed=7)
    assert abs(correlation(u[distance:], u[:-distance])) < SIGMAS / COUNT**0.5


@pytest.mark.parametrize("other", [1, 2, 3, 2**16, 2**31, 2**32, 2**63])
def test_seeds_are_independent_in_all_of_their_64_bits(other: int) -> None:
    assert abs(correlation(draw(0), draw(other))) < SIGMAS / COUNT**0.5
    # Nor does another seed give the same numbers in another order.
    assert not torch.equal(draw(0).sort().values, draw(other).sort().values)


@pytest.mark.parametrize("first", [2**32, 2**33, 2**32 + 1, 2**62])
def test_numbers_do_not_come_again_after_two_to_the_32_elements(first: int) -> None:
    assert abs(correlation(draw(), draw(first=first))) < SIGMAS / COUNT**0.5
    assert not torch.equal(draw().sort().values, draw(first=first).sort().values)


def test_a_number_depends_on_its_index_and_seed_only() -> None:
    index = torch.randint(0, COUNT, (5, 7), generator=torch.Generator().manual_seed(0))
    assert torch.equal(uniform(index, 3), draw(3)[index])


def test_a_negative_seed_counts_modulo_two_to_the_64() -> None:
    assert torch.equal(draw(-3), draw(2**64 - 3))
    assert not torch.equal(draw(-3), draw(3))


@pytest.mark.parametrize("bit", range(0, 48, 5))
def test_every_bit_of_the_index_changes_half_of_the_number(bit: int) -> None:
    index = torch.arange(COUNT)
    flipped = [(uniform(i, 11) * 2**24).long() for i in (index, index ^ (1 << bit))]
    changed = flipped[0] ^ flipped[1]
    for place in range(24):
        share = float((changed >> place & 1).double().mean())
        assert abs(share - 0.5) < SIGMAS * 0.5 / COUNT**0.5
