"""Recipes that store tensors in 8 bits keep no more than the exact one, or say where they do."""

from __future__ import annotations

import pytest
import torch
import transformers

import memopt
from memopt.trace.account import account
from tests.factories import tiny_config, tiny_model

LONG = 128


def kept(model: transformers.PreTrainedModel, recipe: str) -> int:
    ids = torch.arange(2 * LONG).view(2, LONG) % 60 + 3
    memopt.patch(model.train(), recipe)
    return account(model, lambda: model(input_ids=ids, labels=ids).loss).total


def scanning() -> transformers.PreTrainedModel:
    scan = {"num_heads": 8, "head_dim": 16, "state_size": 16, "expand": 2, "n_groups": 1, "chunk_size": 32}
    config = transformers.Mamba2Config(hidden_size=64, num_hidden_layers=2, vocab_size=67, **scan)
    return transformers.Mamba2ForCausalLM(config)


@pytest.mark.parametrize("recipe", ["mesa", "int8"])
def test_scans_run_again_beside_8_bits(recipe: str) -> None:
    assert kept(scanning(), recipe) < kept(scanning(), "exact-unfolded")


def test_mesa_recomputes_attentions_of_a_models_own_code() -> None:
    mesa, exact = (kept(tiny_model("gemma2", max_position_embeddings=LONG), r) for r in ("mesa", "exact-unfolded"))
    assert mesa < exact


@pytest.mark.parametrize(("name", "is_said"), [("gemma2", True), ("llama", False)])
def test_int8_says_that_it_keeps_probabilities(name: str, is_said: bool) -> None:
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(name))
    notes = memopt.plan_for(model, "int8").notes
    assert any("keeps probabilities of 2 attentions" in note for note in notes) == is_said
