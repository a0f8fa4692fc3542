"""The tiny models are what other tests rely on: trainable, deterministic, and hostile to a careless rewrite."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.factories import NAMES, randomise_vectors_, tiny_inputs, tiny_model


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_gets_a_gradient_from_one_training_step(name: str) -> None:
    model = tiny_model(name)
    model(**tiny_inputs(name)).loss.backward()
    assert [key for key, parameter in model.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("name", NAMES)
def test_two_training_forwards_are_equal_because_nothing_drops_out(name: str) -> None:
    model, inputs = tiny_model(name), tiny_inputs(name)
    assert torch.equal(model(**inputs).loss, model(**inputs).loss)


def test_the_seed_decides_the_weights_and_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    first, same, other = (tiny_model("llama", seed=seed).lm_head.weight for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.get_rng_state())


def test_a_16_bit_model_keeps_its_rope_frequencies_in_fp32() -> None:
    model = tiny_model("llama", torch.bfloat16)
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norm_factors_have_both_signs_and_stay_away_from_zero(offset: float) -> None:
    norm = nn.LayerNorm(256)
    randomise_vectors_(norm, norm_offset=offset)
    factor = norm.weight + offset
    assert (factor < 0).any()
    assert (factor > 0).any()
    assert factor.abs().min() > 0.49
