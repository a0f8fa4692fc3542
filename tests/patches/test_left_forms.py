"""Modules that the patch of their kind leaves stock, whose inputs are recomputed all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.falcon.modeling_falcon import FalconLinear

import memopt
from memopt.trace.account import live_bytes
from memopt.walk.probes.linear import is_linear

IDS = torch.arange(128).reshape(2, 64)
SIZE: Any = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def saved(model: Any) -> int:
    memopt.patch(model.train(), memopt.load_recipe("exact-unfolded", ["loss.method=none"]))
    return live_bytes(lambda: model(input_ids=IDS, labels=IDS).loss)


@pytest.mark.parametrize("bias", [False, True])
def test_falcons_own_linears_save_what_plain_ones_save(bias: bool) -> None:
    own, plain = (
        transformers.FalconForCausalLM(transformers.FalconConfig(**SIZE, bias=bias, parallel_attn=False))
        for _ in range(2)
    )
    linears = [module for module in plain.modules() if type(module) is FalconLinear]
    assert all(is_linear(module) is not bias for module in linears)  # under autocast it adds its bias in fp32
    for module in linears:
        module.__class__ = nn.Linear
    assert saved(own) == saved(plain)


def test_a_gated_norm_of_groups_is_recomputed_as_a_chain() -> None:
    sizes = {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16, "chunk_size": 16}
    config = transformers.Mamba2Config(vocab_size=128, hidden_size=64, num_hidden_layers=1, **sizes)
    plan = memopt.plan_for(transformers.Mamba2ForCausalLM(config))
    done = {each.kind: each.action for each in plan.entries if each.site == "backbone.layers.0.mixer.norm"}
    assert (done["norm"], done["chain"]) == ("keep", "recompute")
