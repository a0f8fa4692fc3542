"""Whole models with sampled linears: every other gradient is the stock one, and each family samples what it should."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import memopt
from memopt.patches.sampled_linear.module import SampledLinearRewrite
from memopt.patches.swap import is_swapped, swap_state
from tests.support.compare import step_gradients

SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}
IDS = torch.randint(3, 99, (2, 20), generator=torch.Generator().manual_seed(0))


def bert(**more: Any) -> nn.Module:
    config = transformers.BertConfig(
        **SIZES, intermediate_size=128, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **more
    )
    return transformers.BertForMaskedLM(config)


def opt(**more: Any) -> nn.Module:
    config = transformers.OPTConfig(**SIZES, ffn_dim=128, word_embed_proj_dim=32, dropout=0.0, **more)
    return transformers.OPTForCausalLM(config)


def gpt2(**more: Any) -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=99, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **more
    )
    return transformers.GPT2LMHeadModel(config)


def t5(**more: Any) -> nn.Module:
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=128, num_layers=2, num_heads=4, vocab_size=99, dropout_rate=0.0,
        decoder_start_token_id=0, **more,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def llama(**more: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, intermediate_size=64, **more))


EAGER: dict[str, Any] = {"attn_implementation": "eager"}
#: What to build, with what, the recipe, and the linears that keep a sample, by their last names.
CASES = [
    (bert, {}, "wta-crs", set()),  # GELU's output is recomputed at no cost
    (bert, EAGER, "wta-crs", {"attention.output.dense"}),
    (opt, {}, "wta-crs", {"fc2"}),
    (opt, EAGER, "wta-crs", {"fc2", "out_proj"}),
    (t5, {}, "wta-crs", {"wo"}),
    (t5, EAGER, "wta-crs", {"wo", "o"}),
    (llama, {}, "wta-crs", set()),
    (gpt2, EAGER, "wta-crs", {"attn.c_proj"}),
]


gradients = functools.partial(step_gradients, inputs={"input_ids": IDS, "labels": IDS}, seed=0)


@pytest.mark.parametrize(("build", "settings", "recipe", "expected"), CASES)
def test_only_the_gradients_of_sampled_weights_are_estimated(
    build: Any, settings: dict[str, Any], recipe: str, expected: set[str]
) -> None:
    torch.manual_seed(0)
    stock = build(**settings).train()
    patched = memopt.patch(copy.deepcopy(stock), recipe)
    names = {
        name
        for name, module in patched.named_modules()
        if is_swapped(module) and isinstance(swap_state(module), SampledLinearRewrite)
    }
    assert all(any(name.endswith(f".{last}") for last in expected) for name in names)
    assert all(any(name.endswith(f".{last}") for name in names) for last in expected)
    exact, found = gradients(stock), gradients(patched)
    assert list(exact) == list(found)
    estimated = set()
    # What is zero in theory (the gradient of a key's bias) is what rounding left of the largest.
    least = 1e-5 * max(float(gradient.abs().max()) for gradient in exact.values())
    for name, gradient in exact.items():
        if not torch.allclose(found[name], gradient, rtol=1e-3, atol=least):
            estimated.add(name.removesuffix(".weight"))
    assert estimated == names


def test_the_stock_model_is_there_again_after_unpatch() -> None:
    torch.manual_seed(0)
    stock = opt().train()
    model = memopt.unpatch(memopt.patch(copy.deepcopy(stock), "sampled"))
    exact, found = gradients(stock), gradients(model)
    assert all(torch.equal(exact[name], found[name]) for name in exact)
    assert not any(is_swapped(module) for module in model.modules())
