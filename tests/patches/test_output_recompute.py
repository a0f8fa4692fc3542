"""Linears whose output is recomputed (`linears.recompute`): the stock model's gradients, from fewer bytes."""

from __future__ import annotations

import re

import pytest
import torch

import memopt
from memopt.patches.linear.output import OutputRewrite
from memopt.patches.swap import is_swapped, swap_state
from memopt.reporting.account import account, live_bytes
from memopt.verification.gradient import compare_gradients
from memopt.verification.models import cast_inputs
from tests.factories import tiny_inputs, tiny_model

#: Tiny model -> linears of a block whose output something saves, and hidden states of `intermediate` and attention.
SAVED = {
    "llama": {"gate_proj", "up_proj", "v_proj"},
    "mistral": {"gate_proj", "up_proj"},  # values of grouped queries are repeated: a copy is saved
    "gemma2": {"gate_proj", "up_proj"},
    "qwen3": {"gate_proj", "up_proj", "v_proj"},
    "phi3": {"gate_up_proj"},  # of qkv only the values are saved, a third
    "gpt2": {"c_fc", "c_attn"},
    "bert": {"intermediate.dense", "query", "key", "value"},
    "vit": {"fc1", "q_proj", "k_proj", "v_proj"},
    "opt": {"k_proj", "v_proj"},  # ReLU saves its own output, not fc1's
}


def recipe(*names: str, settings: tuple[str, ...] = ()):
    which = f"[{','.join(names)}]" if names else "auto"
    return memopt.load_recipe("exact-unfolded", (f"linears.recompute={which}", *settings))


def model_of(name: str, dtype=torch.float32):
    model = tiny_model(name, dtype)
    model.config.use_cache = False  # a cache holds copies of keys and values
    return model


def step(model, inputs, seed=0):
    torch.manual_seed(seed)
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def same(found, expected) -> bool:
    """To the bit: what is recomputed is what would have been saved."""
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def chosen(model) -> set[str]:
    names = (n for n, m in model.named_modules() if is_swapped(m) and isinstance(swap_state(m), OutputRewrite))
    return {re.sub(r"^.*\.\d+\.(.*?\.)*?(?=(intermediate\.)?\w+$)", "", name) for name in names}


@pytest.mark.parametrize("name", SAVED)
def test_auto_takes_what_is_saved_and_changes_no_gradient(name):
    exact, inputs = memopt.patch(model_of(name)), tiny_inputs(name, 2, 16)
    expected, kept = step(exact, inputs), account(exact, lambda: exact(**inputs).loss).saved
    model = memopt.patch(model_of(name), recipe())
    assert chosen(model) == SAVED[name]
    for _ in range(2):
        assert same(step(model, inputs), expected)
    saved = account(model, lambda: model(**inputs).loss).saved
    assert saved == live_bytes(lambda: model(**inputs).loss)
    assert saved < 0.85 * kept


@pytest.mark.parametrize("name", ["llama", "gemma2", "bert"])
def test_in_16_bits_too_it_is_no_further_from_the_truth_than_stock(name):
    """To the bit where the norm in front rounds x_hat before it scales; else its recomputed output is off by that."""
    dtype = torch.bfloat16
    inputs = cast_inputs(tiny_inputs(name, 2, 24), dtype)
    truth = step(tiny_model(name, dtype).double(), cast_inputs(inputs, torch.float64))
    stock, exact = (step(model, inputs) for model in (tiny_model(name, dtype), memopt.patch(tiny_model(name, dtype))))
    model = memopt.patch(tiny_model(name, dtype), recipe())
    found = step(model, inputs)
    assert same(found, exact) == (name == "llama")
    for check in compare_gradients([found], [stock], truth, dtype, "fp64", 0.0, 0.0):
        assert check.status == "pass", check
