"""A checkpointed block's second run, in backward, finds what its first run found, and leaves no trace."""

from __future__ import annotations

import collections
import contextlib
import copy
import random
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, spectral_norm
from transformers import DynamicCache
from transformers.utils import ModelOutput

import memopt
from memopt.patches.checkpointing import module as checkpointing
from memopt.patches.checkpointing.module import BlockRewrite, patch_block
from memopt.patches.checkpointing.offload import InputsOfThreads
from memopt.patches.swap import states_in
from memopt.plan.recipe import Recipe, load_recipe
from memopt.torch_compat import kernels_of_attention
from tests.factories import tiny_inputs, tiny_model

STATES = ("spectral norm", "spectral hook", "average", "assigned average", "plain tensor", "counter", "list", "object",
          "tensor of an object", "list in a list", "dict in a dict", "kind of a dict")  # fmt: skip
CHANGED = "modified by an inplace operation"


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


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(ours: dict[str, Tensor], stock: dict[str, Tensor], limit: float = 1e-12) -> None:
    assert ours.keys() == stock.keys()
    least = 1e-6 * max(each.norm() for each in stock.values())
    for name, each in stock.items():
        assert (ours[name] - each).norm() <= limit * each.norm().clamp(min=least), name


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
        assert_same(*(gradients(model, model(x)) for model in models))
        assert state(models[0]) == state(models[1])


@pytest.mark.parametrize("kind", STATES)
def test_several_forwards_may_come_before_their_backward(kind: str, x: Tensor) -> None:
    models = pair(kind)
    assert_same(*(gradients(model, model(x) + model(2 * x)) for model in models))
    for model in models:
        model.eval()(x)
        model.train()
    assert_same(*(gradients(model, model(x) + model(2 * x)) for model in models))
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
        steps.append([gradients(model, model(x).square().sum() + collector.take()) for _ in range(4)])
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
        steps.append([gradients(model, model(x).square().sum()) for _ in range(4)])
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
        found.append(gradients(model.eval(), loss))
        assert not any(module.training for module in model.modules())
    assert_same(*found)


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
            results.append(gradients(block, y.sum()))
            counts.append((len(HOLDERS[kind][1](given)), getattr(given, "calls", None)))
        assert_same(*results)
        assert counts[0] == counts[1]


@pytest.mark.parametrize("by_name", [True, False])
def test_a_list_is_appended_to_once_and_read_as_it_was(by_name: bool, x: Tensor) -> None:
    block, scale, found = Reader().double().train(), torch.ones(8, dtype=torch.float64), []
    for _ in range(2):
        past: list[Tensor] = []
        y = block(x, scales=scale, past=past) if by_name else block(x, scale, past)
        found.append(gradients(block, y.sum()))
        assert len(past) == 1
        if not found[1:]:
            patch_block(block, None, True, None)
    assert_same(found[1], found[0])


def levels(name: str) -> Recipe:
    return load_recipe("exact-levels") if name == "levels" else load_recipe("exact-unfolded", [f"checkpointing.{name}"])


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
        assert_same(*(gradients(model, model(**inputs).loss) for model in (ours, stock)), 1e-6)


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
        found.append(gradients(model, loss))
        found[-1]["states"] = states.grad
    assert_same(*found, 1e-6)


@pytest.mark.parametrize("name", ["llama", "bert", "t5", "mixtral"])
def test_lent_weights_of_real_models(name: str) -> None:
    experts = {"experts_implementation": "eager"} if name == "mixtral" else {}  # the others take no fp64
    stock, inputs, found = tiny_model(name, torch.float64, **experts), tiny_inputs(name), []
    for model in (memopt.patch(copy.deepcopy(stock), levels("levels")), stock):
        lent = {each: 1.01 * p for each, p in model.named_parameters()}
        found.append(gradients(model, torch.func.functional_call(model, lent, (), inputs).loss))
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
        found.append(gradients(model, loss))
        assert kernels_of_attention(with_priority=True) == before
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
        found.append({**gradients(model, model(x).sin().sum()), "x": x.grad})
    assert "checkpointed" in str(memopt.summary(ours))
    assert_same(*found)
