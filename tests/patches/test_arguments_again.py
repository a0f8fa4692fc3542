"""Arguments and caches of a checkpointed block: its second run finds what its first run found, and leaves no trace."""

from __future__ import annotations

import collections
import contextlib
import copy
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.utils import ModelOutput

import memopt
from memopt.patches.checkpointing import module as checkpointing
from memopt.patches.checkpointing.module import BlockRewrite, patch_block
from memopt.patches.checkpointing.offload import InputsOfThreads
from memopt.patches.swap import states_in
from tests.factories import tiny_inputs, tiny_model
from tests.patches.twice import CHANGED, assert_same, levels
from tests.support.compare import gradients_of


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, scales: Any = None, past: Any = None) -> Tensor:
        if isinstance(past, list):
            past.append(x)
            scales = (scales, torch.full((8,), float(len(past)), dtype=x.dtype))
        for scale in scales:
            x = self.linear(x * scale).sin()
        return x


@pytest.mark.parametrize("by_name", [True, False])
def test_tensors_inside_arguments_may_not_change(by_name: bool, x: Tensor) -> None:
    block, scale = Reader().double().train(), torch.ones(8, dtype=torch.float64)
    patch_block(block, None, True, None)
    y = block(x, scales=(scale,)) if by_name else block(x, (scale,))
    scale.mul_(2)
    with pytest.raises(RuntimeError, match=CHANGED):
        y.sum().backward()


@dataclass
class Output(ModelOutput):
    found: list[float] | None = None


#: An argument that a block may add to -> where the block finds it.
HOLDERS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list in a dictionary": (lambda: {"found": []}, lambda given: given["found"]),
    "list in a tuple": (lambda: ([],), lambda given: given[0]),
    "set in a list": (lambda: [set()], lambda given: given[0]),
    "deque in a dictionary": (lambda: {"found": collections.deque()}, lambda given: given["found"]),
    "default of a dictionary": (lambda: {1: collections.defaultdict(list)}, lambda given: given[1]["found"]),
    "list in an object": (lambda: types.SimpleNamespace(found=[]), lambda given: given.found),
    "object in an object": (
        lambda: [types.SimpleNamespace(of=types.SimpleNamespace(found=[]))],
        lambda x: x[0].of.found,
    ),
    "output of a model": (lambda: Output([1.0]), lambda given: given["found"]),
}


class Adds(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear, self.down = kind, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, given: Any) -> Tensor:
        found = HOLDERS[self.kind][1](given)
        (found.add if isinstance(found, set) else found.append)(float(x.detach().mean()))
        if hasattr(given, "__dict__"):
            given.calls = getattr(given, "calls", 0) + 1
        return x + self.down(self.linear(x * len(found)).sin() * getattr(given, "calls", 1))


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("kind", HOLDERS)
def test_what_lies_inside_an_argument_is_added_to_once_and_read_as_it_was(kind: str, by_name: bool, x: Tensor) -> None:
    torch.manual_seed(0)
    stock = Adds(kind).double().train()
    ours = copy.deepcopy(stock)
    patch_block(ours, None, True, None)
    for _ in range(2):
        results, counts = [], []
        for block in (ours, stock):
            given = HOLDERS[kind][0]()
            y = x
            for _ in range(3):  # later calls find more
                y = block(y, given=given) if by_name else block(y, given)
            results.append(gradients_of(block, y.sum()))
            counts.append((len(HOLDERS[kind][1](given)), getattr(given, "calls", None)))
        assert_same(*results)
        assert counts[0] == counts[1]


@pytest.mark.parametrize("by_name", [True, False])
def test_a_list_is_appended_to_once_and_read_as_it_was(by_name: bool, x: Tensor) -> None:
    block, scale, found = Reader().double().train(), torch.ones(8, dtype=torch.float64), []
    for _ in range(2):
        past: list[Tensor] = []
        y = block(x, scales=scale, past=past) if by_name else block(x, scale, past)
        found.append(gradients_of(block, y.sum()))
        assert len(past) == 1
        if not found[1:]:
            patch_block(block, None, True, None)
    assert_same(found[1], found[0])


def lora(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))


# The loss of a language model is in fp32 whatever the dtype of its logits.
@pytest.mark.parametrize("recipe", ["levels", "method=full"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("adapt", [None, lora])
def test_a_cache_given_by_position_is_written_by_no_second_run(
    attention: str, padded: bool, recipe: str, adapt: Callable[[nn.Module], nn.Module] | None
) -> None:
    stock, inputs = tiny_model("gpt2", torch.float64, attn_implementation=attention), tiny_inputs("gpt2")
    if padded:
        inputs["attention_mask"][0, :3] = 0
    torch.manual_seed(0)
    stock = adapt(stock) if adapt else stock
    ours = memopt.patch(copy.deepcopy(stock), levels(recipe))
    for _ in range(2):
        assert_same(*(gradients_of(model, model(**inputs).loss) for model in (ours, stock)), 1e-6)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_no_cache_has_the_states_of_some_blocks(name: str) -> None:
    model, inputs = memopt.patch(tiny_model(name), levels("levels")), tiny_inputs(name)
    again = {state.is_checkpointed for *_, state in states_in(model, BlockRewrite)}
    assert again == {False, True}
    cache = DynamicCache(config=model.config)
    model(**inputs, past_key_values=cache)
    assert not any(layer.is_initialized for layer in cache.layers)
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
    assert all(layer.is_initialized for layer in cache.layers)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("recipe", ["levels", "method=full"])
def test_a_cache_that_holds_states_is_read(name: str, recipe: str) -> None:
    stock, inputs = tiny_model(name, torch.float64), tiny_inputs(name)
    del inputs["attention_mask"]
    ours, found = memopt.patch(copy.deepcopy(stock), levels(recipe)), []
    for model in (ours, stock):
        states = torch.randn(2, 2, 4, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        states = states[:, :, : getattr(stock.config, "num_key_value_heads", 4)].requires_grad_()
        cache = DynamicCache(config=stock.config)
        for place in range(stock.config.num_hidden_layers):
            cache.update(states[0], states[1], place)
        checkpointing._say_runs_once.cache_clear()
        with pytest.warns(match="run only once") if model is ours else contextlib.nullcontext():
            loss = model(**inputs, past_key_values=cache).loss
        found.append(gradients_of(model, loss))
        found[-1]["states"] = states.grad
    assert_same(*found, 1e-6)


class Attends(nn.Module):
    """A block whose result depends on which of its arguments are the same tensor, as `nn.MultiheadAttention` does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, hook: Callable[[Tensor], Any] | None = None) -> Tensor:
        for given in (q, k, v) if hook else ():
            hook(given)
        return self.norm(q + self.attention(q, k, v, need_weights=False)[0])


def _attends(by_name: bool, offloads: bool | None, x: Tensor, hook: Callable[[Tensor], Any] | None) -> list[Tensor]:
    """The gradients of a block and of its input; `offloads` is None for the stock block."""
    torch.manual_seed(0)
    block, x = Attends().double().train(), x.detach().requires_grad_()
    if offloads is not None:
        patch_block(block, None, True, InputsOfThreads() if offloads else None)
    hidden = x * 2
    y = block(hidden, k=hidden, v=hidden, hook=hook) if by_name else block(hidden, hidden, hidden, hook)
    return [*torch.autograd.grad(y.sin().sum(), [x, *block.parameters()])]


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("offloads", [True, False])
def test_arguments_that_are_one_tensor_are_one_in_the_second_run(offloads: bool, by_name: bool, x: Tensor) -> None:
    for ours, stock in zip(_attends(by_name, offloads, x, None), _attends(by_name, None, x, None), strict=True):
        torch.testing.assert_close(ours, stock)


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("offloads", [True, False])
def test_hooks_that_both_runs_register_on_an_argument_run_once(offloads: bool, by_name: bool, x: Tensor) -> None:
    found, calls = [], []
    for of in (offloads, None):
        kept: list[Tensor] = []

        def hook(given: Tensor, kept: list[Tensor] = kept) -> None:
            given.retain_grad()
            kept.append(given)
            given.register_hook(lambda dy: dy * 1.5)

        gradients_, count = _attends(by_name, of, x, hook), 3
        assert len(kept) >= count
        found.append([*gradients_, *(each.grad for each in kept[:count])])
        calls.append(len(kept))
    for ours, stock in zip(*found, strict=True):
        torch.testing.assert_close(ours, stock)
    assert calls == [6, 3], "the block has not run twice, so the test shows nothing"


class Scaled(nn.Module):
    """A block whose first product reads its input, and is recomputed from it where the input is a result."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 2, 8))
        self.up, self.act, self.down = nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        normalised = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 0.1)
        return x + self.down(self.act(self.up(normalised * self.weight)))


@pytest.mark.parametrize("of_adapters", [False, True])
@pytest.mark.parametrize("recipe", ["exact-levels", "long-context"])
def test_the_first_block_may_get_a_leaf(recipe: str, of_adapters: bool, x: Tensor) -> None:
    """`enable_input_require_grads` makes the embeddings of a model with adapters one."""
    torch.manual_seed(0)
    stock = nn.Sequential(*(Scaled() for _ in range(3))).double().train()
    for parameter in stock[0].parameters() if of_adapters else ():
        parameter.requires_grad_(parameter.dim() == 1)
    ours = copy.deepcopy(stock)
    memopt.patch(ours, recipe=recipe, inputs={"input": x})
    x.requires_grad_()
    found = []
    for model in (ours, stock):
        x.grad = None
        found.append({**gradients_of(model, model(x).sin().sum()), "x": x.grad})
    assert "checkpointed" in str(memopt.summary(ours))
    assert_same(*found)
