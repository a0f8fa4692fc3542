"""Modules that compute a known formula, but declare another gradient, branch on lengths or keep something."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import memopt

pytestmark = pytest.mark.filterwarnings("ignore:memopt")
SIZE = 8


class Halved(torch.autograd.Function):
    """The identity, whose backward halves the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy / 2


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def root(x: Tensor) -> Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def keeping(norm: nn.Module, x: Tensor) -> Tensor:
    norm.last = x
    return rms(x, norm.weight)


NORMS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "none": lambda norm, x: rms(x, norm.weight),
    "a detached root": lambda norm, x: x * root(x).detach() * norm.weight,
    "a detached weight": lambda norm, x: rms(x, norm.weight.detach()),
    "a function with another backward": lambda norm, x: rms(Halved.apply(x), norm.weight),
    "more for long inputs": lambda norm, x: rms(x, norm.weight) * (2 if x.shape[1] > 8 else 1),
    "more for many rows": lambda norm, x: rms(x, norm.weight) * (2 if x.shape[0] > 8 else 1),
    "three dimensions": lambda norm, x: rms(x.transpose(1, 2).transpose(1, 2), norm.weight),
    "a limit on values": lambda norm, x: rms(x.clamp(-20, 20), norm.weight),
    "another result without gradients": lambda norm, x: rms(x, norm.weight) * (2 if torch.is_grad_enabled() else 1),
    "its input kept": keeping,
}


class Norm(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.weight, self.compute = nn.Parameter(torch.ones(SIZE)), NORMS[name]

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


MLPS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "nothing else": lambda mlp, x: mlp.down(F.silu(mlp.gate(x)) * mlp.up(x)),
    "a detached gate": lambda mlp, x: mlp.down(F.silu(mlp.gate(x)).detach() * mlp.up(x)),
    "a function with another backward": lambda mlp, x: mlp.down(Halved.apply(F.silu(mlp.gate(x)) * mlp.up(x))),
    "more for long inputs": lambda mlp, x: mlp.down(F.silu(mlp.gate(x)) * mlp.up(x)) * (2 if x.shape[1] > 8 else 1),
    "more for large inputs": lambda mlp, x: mlp.down(F.silu(mlp.gate(x)) * mlp.up(x)) * (2 if x.abs().max() > 1 else 1),
}


class MLP(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(SIZE, 12), nn.Linear(SIZE, 12), nn.Linear(12, SIZE)
        self.compute = MLPS[name]

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


class Model(nn.Module):
    """Two blocks of attention's place, a norm and an MLP; `aux` is what a block keeps for a loss of its own."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, SIZE)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(SIZE), make(), nn.Linear(SIZE, SIZE)) for _ in range(3))
        self.head = nn.Linear(SIZE, 16)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) * 30
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def gradients(model: nn.Module, aux: Callable[[nn.Module], Any] = lambda model: 0) -> list[Tensor]:
    ids = torch.arange(2 * 11).view(2, 11) % 16
    (model(ids).square().mean() + aux(model)).backward()
    found = [torch.zeros_like(each) if each.grad is None else each.grad for each in model.parameters()]
    return [each.detach() for each in found]


def pair(make: Callable[[], nn.Module], recipe: Any) -> tuple[Model, Model]:
    torch.manual_seed(0)
    stock = Model(make).double()
    return stock, memopt.patch(copy.deepcopy(stock), recipe, inputs={"input_ids": torch.arange(10).view(2, 5)})


def assert_alike(stock: list[Tensor], ours: list[Tensor]) -> None:
    for one, other in zip(stock, ours, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NORMS)
def test_a_norm(name: str) -> None:
    stock, ours = pair(lambda: Norm(name), "exact-unfolded")
    assert_alike(gradients(stock), gradients(ours))
    kept = [getattr(layer[1], "last", None) for layer in ours.layers]
    assert [each is not None for each in kept] == [name == "its input kept"] * 3


@pytest.mark.parametrize("name", MLPS)
def test_a_gated_mlp(name: str) -> None:
    stock, ours = pair(lambda: MLP(name), "exact-unfolded")
    assert_alike(gradients(stock), gradients(ours))


class Keeping(MLP):
    """Keeps the mean of its gate, with its graph, for a loss of its own."""

    def __init__(self) -> None:
        super().__init__("nothing else")

    def forward(self, x: Tensor) -> Tensor:
        self.aux = self.gate(x).mean()
        return super().forward(x)


class Lent(nn.Module):
    """Reads a weight of another module, which stands in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, 24), nn.Linear(24, SIZE)
        self.lent: list[nn.Module] = []

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(x))
        return self.down(h * self.lent[0].weight[0].repeat(3) if self.lent else h)


class Counting(nn.Module):
    """An activation of several operations that sums up what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += x.detach().sum()
        return x * torch.sigmoid(1.3 * x) * 0.7


TILES = memopt.load_recipe("long-context", ["tiles.tokens=3"])


def test_a_module_that_keeps_something_runs_whole() -> None:
    stock, ours = pair(Keeping, TILES)

    def aux(model: Any) -> Any:
        return sum(layer[1].aux for layer in model.layers)

    assert_alike(gradients(stock, aux), gradients(ours, aux))


def test_a_module_that_reads_a_weight_of_others_runs_whole() -> None:
    stock, ours = pair(Lent, TILES)
    for model in (stock, ours):
        for layer in model.layers:
            layer[1].lent.append(model.embed)
    assert_alike(gradients(stock), gradients(ours))


class Block(nn.Module):
    """A linear reads the block's input itself, as in the decoders of DETR."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.mlp = nn.Linear(SIZE, SIZE), MLP("nothing else")
        self.norm, self.last = Norm("none"), Norm("none")

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + self.mix(x))
        return self.last(x + self.mlp(x))


@pytest.mark.parametrize("recipe", ["exact-unfolded", TILES])
def test_an_activation_that_counts_does_so_once_a_step(recipe: Any) -> None:
    stock, ours = pair(lambda: nn.Sequential(nn.Linear(SIZE, 24), Counting(), nn.Linear(24, SIZE)), recipe)
    assert_alike(gradients(stock), gradients(ours))
    counts = [[layer[1][1].seen for layer in model.layers] for model in (stock, ours)]
    torch.testing.assert_close(counts[1], counts[0])


@pytest.mark.parametrize("take", [lambda x: x.expand(4, -1, -1), lambda x: x.repeat(1, 2, 1)[:, ::2]])
def test_an_input_of_a_block_with_strides_of_its_own_is_not_offloaded(take: Callable[[Tensor], Tensor]) -> None:
    class Queries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layers = nn.Embedding(16, SIZE), nn.ModuleList(Block() for _ in range(3))

        def forward(self, input_ids: Tensor) -> Tensor:
            x = take(self.embed(input_ids[:1]))
            for layer in self.layers:
                x = layer(x)
            return x.pow(3)

    torch.manual_seed(0)
    stock = Queries().double()
    recipe = memopt.load_recipe("exact-unfolded", ["checkpointing.method=full", "checkpointing.offload=input"])
    ours = memopt.patch(copy.deepcopy(stock), recipe, inputs={"input_ids": torch.arange(10).view(2, 5)})
    assert_alike(gradients(stock), gradients(ours))


def test_hooks_of_the_user_see_no_call_of_a_proof() -> None:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    model, seen = LlamaForCausalLM(config), []
    for module in model.modules():
        module.register_forward_hook(lambda module, given, output: seen.append(type(module).__name__))
        module.register_forward_pre_hook(lambda module, given: seen.append(type(module).__name__))
    memopt.patch(model)
    assert seen == []
