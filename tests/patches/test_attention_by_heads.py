"""Checkpointed blocks whose attention goes backward by groups of heads."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import memopt
from memopt.patches.checkpointing import heads
from memopt.patches.checkpointing.heads import ByHeads
from memopt.plan.recipe import load_recipe
from tests.factories import tiny_inputs, tiny_model

LAYERS = {"llama": 2, "gpt2": 3, "bert": 2}
GROUPS = ["checkpointing.attention_room=0.001"]


class Backwards(TorchDispatchMode):
    """Heads of each call of an operator that is a backward of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.heads: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__
        if "attention" in name and "backward" in name:
            self.heads.append(args[2].size(1))
        return function(*args, **(kwargs or {}))


def patched(model: nn.Module, *settings: str) -> nn.Module:
    recipe = load_recipe("exact-unfolded", ["checkpointing.method=full", *settings])
    return memopt.patch(copy.deepcopy(model).train(), recipe)


def gradients(model: nn.Module, inputs: dict[str, Tensor], around=contextlib.nullcontext) -> dict[str, Tensor]:
    torch.manual_seed(0)
    with around():
        loss = model(**inputs).loss
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], each) for name, each in theirs.items())


@pytest.mark.parametrize("settings", [[], ["checkpointing.keep=attention", "checkpointing.offload=input"]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_equal_to_the_bit(name, dtype, settings):
    model, inputs = tiny_model(name, dtype), tiny_inputs(name)
    inputs.pop("attention_mask", None)  # a mask of ones is a mask
    expected = gradients(patched(model, *settings), inputs)
    with Backwards() as seen:
        found = gradients(patched(model, *settings, *GROUPS), inputs)
    every = getattr(model.config, "num_key_value_heads", model.config.num_attention_heads)
    assert seen.heads == [1] * every * LAYERS[name]
    assert equal(found, expected)


def test_batches_of_gradients():
    model, inputs = tiny_model("llama", torch.float64), tiny_inputs("llama")
    inputs.pop("attention_mask", None)
    rows, found = torch.eye(inputs["input_ids"].shape[1], dtype=torch.float64), []
    for ours in (patched(model, *GROUPS), patched(model)):
        embedded = ours.get_input_embeddings()(inputs["input_ids"]).detach().requires_grad_()
        sums = ours.model(inputs_embeds=embedded).last_hidden_state.sum(-1).sum(0)
        found += torch.autograd.grad(sums, embedded, rows, is_grads_batched=True)
    torch.testing.assert_close(*found)


def test_under_autocast_too():
    model, inputs = tiny_model("llama", torch.float32), tiny_inputs("llama")

    def around():
        return torch.autocast("cpu", torch.bfloat16)

    expected = gradients(patched(model), inputs, around)
    with Backwards() as seen:
        found = gradients(patched(model, *GROUPS), inputs, around)
    assert set(seen.heads) == {1}
    assert equal(found, expected)


def test_a_backward_in_another_thread():
    model, inputs = tiny_model("llama", torch.float64), tiny_inputs("llama")
    expected = gradients(patched(model), inputs)
    ours = patched(model, *GROUPS)
    loss = ours(**inputs).loss
    with ThreadPoolExecutor(1) as thread:
        thread.submit(loss.backward).result()
    assert equal({n: p.grad for n, p in ours.named_parameters() if p.grad is not None}, expected)


@pytest.mark.parametrize(
    ("changed", "settings"),
    [
        ({"attention_dropout": 0.4}, {}),  # random numbers of a group would be others
        ({}, {"attn_implementation": "eager"}),
        ({}, {"mask": True}),
    ],
)
def test_other_attention_is_left_as_it_is(changed, settings):
    model, inputs = tiny_model("llama", torch.float64, **changed), tiny_inputs("llama")
    model.set_attn_implementation(settings.get("attn_implementation", "sdpa"))
    if settings.get("mask"):
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["attention_mask"][0, :2] = 0
    expected = gradients(patched(model), inputs)
    with Backwards() as seen:
        found = gradients(patched(model, *GROUPS), inputs)
    assert set(seen.heads) <= {model.config.num_key_value_heads, model.config.num_attention_heads}
    assert equal(found, expected)


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[function.__name__] += 1
        return function(*args, **(kwargs or {}))


def three(heads: int = 4, shared: int = 1, width: int = 16, value: int = 16) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (2, heads * shared, 32, width), (2, heads, 32, width), (2, heads, 32, value)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def test_room_decides_how_many_heads_are_in_a_group():
    def groups(room: int) -> list[int]:
        q, k, v = three()
        with ByHeads(room), Backwards() as seen:
            F.scaled_dot_product_attention(q, k, v).sum().backward()
        return seen.heads

    of_one = 2 * 32 * 16 * (4 + 5 * 8)
    assert groups(1) == [1] * 4
    assert groups(2 * of_one) == [2, 2]
    assert groups(3 * of_one) == [3, 1]
    assert groups(4 * of_one) == [4]


def test_without_gradients_nothing_is_saved():
    q, k, v = three()
    with ByHeads(1), torch.no_grad():
        assert F.scaled_dot_product_attention(q, k, v).grad_fn is None


def test_another_operator_is_left_as_it_is_and_tried_once(monkeypatch):
    monkeypatch.setattr(heads, "_OTHERWISE", set())
    expected = three()
    with sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(*expected).sin().sum().backward()
    softmaxes = []
    for _ in range(2):
        ours = three()
        with sdpa_kernel(SDPBackend.MATH), ByHeads(1), Calls() as calls:
            F.scaled_dot_product_attention(*ours).sin().sum().backward()
        softmaxes.append(sum(count for name, count in calls.calls.items() if "softmax" in name and "back" not in name))
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, expected, strict=True))
    assert softmaxes == [2, 1]


def test_the_second_run_of_a_block_goes_as_its_first(monkeypatch):
    """Though attention of the same form went another way meanwhile."""
    monkeypatch.setattr(heads, "_OTHERWISE", set())
    model, inputs = tiny_model("llama", torch.float64), tiny_inputs("llama")
    expected = gradients(patched(model), inputs)
    ours = patched(model, *GROUPS)
    loss = ours(**inputs).loss
    with sdpa_kernel(SDPBackend.MATH):
        ours(**inputs)
    assert heads._OTHERWISE
    with Backwards() as seen:
        loss.backward()
    assert set(seen.heads) == {1}
    assert equal({n: p.grad for n, p in ours.named_parameters() if p.grad is not None}, expected)


def test_a_second_derivative_is_refused():
    q, k, v = three()
    with ByHeads(1):
        output = F.scaled_dot_product_attention(q, k, v)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(output.sum(), q, create_graph=True)


def test_keys_that_several_heads_share():
    expected, ours = three(heads=2, shared=3), three(heads=2, shared=3)
    F.scaled_dot_product_attention(*expected, enable_gqa=True).sin().sum().backward()
    with ByHeads(1), Backwards() as seen:
        F.scaled_dot_product_attention(*ours, enable_gqa=True).sin().sum().backward()
    assert seen.heads == [1, 1]
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, expected, strict=True))
