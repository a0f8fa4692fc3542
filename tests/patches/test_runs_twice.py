"""A checkpointed block's second run, in backward, finds the state that its first run found, and leaves no trace."""

from __future__ import annotations

import collections
import copy
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, spectral_norm

import memopt
from memopt.patches.checkpointing.module import patch_block
from memopt.torch_compat import kernels_of_attention
from tests.factories import tiny_inputs, tiny_model
from tests.patches.twice import CHANGED, assert_same, levels
from tests.support.compare import gradients_of

STATES = ("spectral norm", "spectral hook", "average", "assigned average", "plain tensor", "counter", "list", "object",
          "tensor of an object", "list in a list", "dict in a dict", "kind of a dict")  # fmt: skip


class Block(nn.Module):
    """A block whose result depends on state that its forward changes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls, self.seen = kind, 0, list[float]()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)
        if kind == "spectral norm":
            parametrizations.spectral_norm(self.up)
        elif kind == "spectral hook":
            spectral_norm(self.up)
        self.register_buffer("average", torch.ones(8))
        self.plain = torch.ones(8, dtype=torch.float64)
        self.object = types.SimpleNamespace(calls=0, held=types.SimpleNamespace(average=torch.ones(8).double()))
        self.lists, self.dicts = [[1.0]], {"inner": {"calls": 0}, "kind": collections.Counter()}

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(self.act(self.up(h / self.divisor(h.detach().abs().mean((0, 1))))))

    def divisor(self, size: Tensor) -> Any:
        if self.kind == "assigned average":
            self.average = self.average * 0.9 + 0.1 * size
        elif self.kind in ("average", "plain tensor"):
            held = self.average if self.kind == "average" else self.plain
            held.mul_(0.9).add_(size, alpha=0.1)
            return held.clone()
        elif self.kind == "counter":
            self.calls += 1
        elif self.kind == "list":
            self.seen.append(1.0)
        elif self.kind == "object":
            self.object.calls += 1
        elif self.kind == "tensor of an object":
            self.object.held.average.mul_(0.9).add_(size, alpha=0.1)
        elif self.kind == "list in a list":
            self.lists[0].append(1.0)
        elif self.kind == "dict in a dict":
            self.dicts["inner"]["calls"] += 1
        elif self.kind == "kind of a dict":
            self.dicts["kind"].update(calls=1)
        calls = self.calls + self.object.calls + self.dicts["inner"]["calls"] + self.dicts["kind"]["calls"]
        return self.average * (1 + calls) * (len(self.lists[0]) + len(self.seen)) * self.object.held.average.clone()


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(kind) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def pair(kind: str) -> tuple[Model, Model]:
    """A model, and its copy with checkpointed blocks."""
    torch.manual_seed(0)
    stock = Model(kind).double().train()
    ours = copy.deepcopy(stock)
    for layer in ours.layers:
        patch_block(layer, None, True, None)
    return ours, stock


def state(model: Model) -> list[Any]:
    held = [
        (layer.calls, len(layer.seen), layer.plain.tolist(), str(layer.object), layer.lists, layer.dicts)
        for layer in model.layers
    ]
    return [*held, *(each.tolist() for each in model.buffers())]


@pytest.mark.parametrize("kind", STATES)
def test_state_that_the_forward_changes_is_changed_once_and_read_as_it_was(kind: str, x: Tensor) -> None:
    models = pair(kind)
    for _ in range(4):
        assert_same(*(gradients_of(model, model(x)) for model in models))
        assert state(models[0]) == state(models[1])


@pytest.mark.parametrize("kind", STATES)
def test_several_forwards_may_come_before_their_backward(kind: str, x: Tensor) -> None:
    models = pair(kind)
    assert_same(*(gradients_of(model, model(x) + model(2 * x)) for model in models))
    for model in models:
        model.eval()(x)
        model.train()
    assert_same(*(gradients_of(model, model(x) + model(2 * x)) for model in models))
    assert state(models[0]) == state(models[1])


class Collector:
    """Auxiliary losses of all blocks, as mixtures of experts collect them."""

    def __init__(self) -> None:
        self.list, self.dict, self.deque = list[Tensor](), dict[int, Tensor](), collections.deque[Tensor]()

    def take(self) -> Tensor:
        found = [*self.list, *self.dict.values(), *self.deque]
        for each in (self.list, self.dict, self.deque):
            each.clear()
        return torch.stack(found).sum()


class Collecting(Block):
    def __init__(self, kind: str, collector: Collector) -> None:
        super().__init__(kind)
        self.collector, self.own = collector, getattr(collector, kind)

    def forward(self, x: Tensor) -> Tensor:
        loss = self.up(x).square().mean()
        if self.kind == "dict":
            self.own[len(self.own)] = loss
        else:
            self.own.append(loss)
        return super().forward(x)


@pytest.mark.parametrize("kind", ["list", "dict", "deque"])
def test_what_blocks_collect_is_collected_once_also_if_it_is_taken_before_backward(kind: str, x: Tensor) -> None:
    steps = []
    for is_ours in (True, False):
        torch.manual_seed(0)
        collector = Collector()
        model = nn.Sequential(*(Collecting(kind, collector) for _ in range(2))).double().train()
        for layer in model if is_ours else ():
            patch_block(layer, None, True, None)
        steps.append([gradients_of(model, model(x).square().sum() + collector.take()) for _ in range(4)])
        assert not getattr(collector, kind)
    for pair_of_steps in zip(*steps, strict=True):
        assert_same(*pair_of_steps)


class Drawing(Block):
    """Multiplies by a random number of a generator that PyTorch's checkpoint function does not set back."""

    def __init__(self, draw: Callable[[Drawing], float]) -> None:
        super().__init__("none")
        self.draw = draw
        self.own, self.torch_s = random.Random(0), torch.Generator().manual_seed(0)
        self.older, self.newer = np.random.RandomState(0), np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.tensor(1 + self.draw(self), dtype=x.dtype)


DRAWS: dict[str, Callable[[Drawing], float]] = {
    "python": lambda block: random.random(),
    "numpy": lambda block: np.random.rand(),
    "own of python": lambda block: block.own.random(),
    "own of numpy": lambda block: block.newer.random(),
    "own of numpy, older": lambda block: block.older.rand(),
    "own of torch": lambda block: torch.rand((), generator=block.torch_s).item(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_the_second_run_draws_the_numbers_of_the_first_and_later_steps_go_on_from_there(name: str, x: Tensor) -> None:
    steps = []
    for is_ours in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(*(Drawing(DRAWS[name]) for _ in range(2))).double().train()
        for layer in model if is_ours else ():
            patch_block(layer, None, True, None)
        random.seed(0)
        np.random.seed(0)
        steps.append([gradients_of(model, model(x).square().sum()) for _ in range(4)])
    for pair_of_steps in zip(*steps, strict=True):
        assert_same(*pair_of_steps)


def test_a_retained_graph_runs_from_the_same_state_again(x: Tensor) -> None:
    ours, _ = pair("average")
    loss = ours(x)
    first = torch.autograd.grad(loss, list(ours.parameters()), retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, list(ours.parameters()))))


def test_state_that_is_too_large_to_copy_is_an_error(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memopt.patches.checkpointing.state._LARGEST_COPY", 4)
    ours, _ = pair("average")
    with pytest.raises(RuntimeError, match=r"'average' \[8\] of Block .* block's own forward changes them"):
        ours(x).backward()


@pytest.mark.parametrize("name", ["norm.weight", "up.weight", "down.bias", "average"])
def test_what_a_block_holds_may_not_change_in_place_before_backward(name: str, x: Tensor) -> None:
    ours, _ = pair("none")
    loss = ours(x)
    with torch.no_grad():
        ours.layers[0].get_parameter(name).mul_(2) if "." in name else ours.layers[0].average.mul_(2)
    with pytest.raises(RuntimeError, match=f"{CHANGED}: '{name.rpartition('.')[2]}'.*Change weights after backward"):
        loss.backward()


def test_weights_that_were_lent_are_those_of_the_second_run(x: Tensor) -> None:
    found = []
    for model in pair("none"):
        lent = {name: (1.5 * p).detach().requires_grad_() for name, p in model.named_parameters()}
        loss = torch.func.functional_call(model, lent, (x,))
        found.append(dict(zip(lent, torch.autograd.grad(loss, list(lent.values())), strict=True)))
        assert not any(p is lent[name] for name, p in model.named_parameters())
    assert_same(*found)


def test_lent_weights_may_not_change_in_place_either(x: Tensor) -> None:
    ours, _ = pair("none")
    lent = {name: (1.5 * p).detach().requires_grad_() for name, p in ours.named_parameters()}
    loss = torch.func.functional_call(ours, lent, (x,))
    with torch.no_grad():
        lent["layers.0.down.bias"].add_(1)
    with pytest.raises(RuntimeError, match=CHANGED):
        loss.backward()


def test_a_model_that_is_switched_to_evaluation_drops_out_as_in_its_forward(x: Tensor) -> None:
    found = []
    for model in pair("none"):
        model.layers[0].act = nn.Sequential(nn.GELU(), nn.Dropout(0.5))
        torch.manual_seed(1)
        loss = model(x)
        found.append(gradients_of(model.eval(), loss))
        assert not any(module.training for module in model.modules())
    assert_same(*found)


@pytest.mark.parametrize("name", ["llama", "bert", "t5", "mixtral"])
def test_lent_weights_of_real_models(name: str) -> None:
    experts = {"experts_implementation": "eager"} if name == "mixtral" else {}  # the others take no fp64
    stock, inputs, found = tiny_model(name, torch.float64, **experts), tiny_inputs(name), []
    for model in (memopt.patch(copy.deepcopy(stock), levels("levels")), stock):
        lent = {each: 1.01 * p for each, p in model.named_parameters()}
        found.append(gradients_of(model, torch.func.functional_call(model, lent, (), inputs).loss))
    assert_same(*found, 1e-6)


@pytest.mark.parametrize("name", ["llama", "bert"])
@pytest.mark.parametrize("recipe", ["levels", "method=full"])
def test_transforms_of_functions_run_no_block_twice(name: str, recipe: str) -> None:
    stock, inputs, found = tiny_model(name, torch.float64), tiny_inputs(name), []
    for model in (memopt.patch(copy.deepcopy(stock), levels(recipe)), stock):

        def loss(weights: dict[str, Tensor], model: nn.Module = model) -> Tensor:
            value: Tensor = torch.func.functional_call(model, weights, (), inputs).loss
            return value

        found.append(torch.func.grad(loss)({each: p.detach() for each, p in model.named_parameters()}))
    assert_same(*found, 1e-6)


def test_under_autocast_an_error_names_the_weight() -> None:
    model, inputs = memopt.patch(tiny_model("llama"), levels("method=full")), tiny_inputs("llama")
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**inputs).loss
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight.add_(1)
    with pytest.raises(RuntimeError, match=r"'weight' \[64\] of LlamaDecoderLayer\.input_layernorm is at"):
        loss.backward()


@pytest.mark.parametrize("recipe", ["exact-levels", "long-context"])
def test_kernels_of_attention_that_the_forward_allowed_run_again(recipe: str) -> None:
    stock, inputs, found = tiny_model("llama", torch.float64), tiny_inputs("llama"), []
    for model in (memopt.patch(copy.deepcopy(stock), recipe), stock):
        with sdpa_kernel(SDPBackend.MATH):
            loss = model(**inputs).loss
        before = kernels_of_attention(with_priority=True)
        found.append(gradients_of(model, loss))
        assert kernels_of_attention(with_priority=True) == before
    assert_same(*found, 1e-6)
