"""The papers' accounts: the rule of counting, and what falls short."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.papers import Block, StepMemory, shortfalls, terms

VIT = Block("ViT", tuple(terms(4.0, gated=False)), (19.0, 11.5, -39.47), {"exact-unfolded": 10.05})
LLAMA = Block("LLaMA-13B", tuple(terms(2.7, gated=True)), (21.8, 15.45, -29.19), {"exact-unfolded": 11.4})


def test_the_rule_of_lowmemory_bp_gives_the_numbers_that_it_prints() -> None:
    assert VIT.counted == pytest.approx((19.0, 11.5, -39.4737), abs=1e-3)
    assert LLAMA.counted == pytest.approx((21.8, 15.4375, -29.1858), abs=1e-3)
    assert list(shortfalls([VIT, LLAMA], [])) == []


def test_another_number_a_large_block_and_a_far_prediction_fall_short() -> None:
    wrong = replace(VIT, published=(19.0, 11.4, -39.47))
    large = replace(VIT, traced={"exact-unfolded": 12.0})
    far = StepMemory("Mesa", "DeiT-Ti", 4171, 8000)
    assert len(list(shortfalls([wrong, large], [far, replace(far, stock=False)]))) == 3
