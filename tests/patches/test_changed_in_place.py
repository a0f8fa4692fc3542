"""Tensors that memopt saves where stock modules save others, and that the model or its caller changes in place."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import OlmoConfig, OlmoForCausalLM

import memopt

WIDTH, BATCH = 16, (2, 5)
RECIPES = ["exact-unfolded", "exact-levels", "long-context"]
Change = Callable[[Tensor], object]


def bare_norm() -> nn.Module:
    return nn.LayerNorm(WIDTH, elementwise_affine=False)


class Composed(nn.Module):
    """An activation of several operations, which save their outputs."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(-torch.tanh(x)) * torch.sigmoid(x).exp()


class Gated(nn.Module):
    """A module without a formula, with the parameters of a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return torch.tanh(x) * torch.sigmoid(gate) * self.weight


def pure(x: Tensor) -> Tensor:
    return torch.exp(-x) * torch.tanh(x).sigmoid() + torch.rsqrt(x.exp() + 1)


class Normed(nn.Module):
    """A block that changes the output of a norm in place, before or after others read it."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.norm, self.up, self.down = bare_norm(), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        self.change(h)
        return x + self.down(nn.functional.gelu(self.up(h)))


class Late(Normed):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        y = x + self.down(nn.functional.gelu(self.up(h * 1.0)))
        self.change(h)
        return y + h


class OfComposed(nn.Module):
    """A block that changes what an activation has read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.act = Composed()

    def forward(self, x: Tensor) -> Tensor:
        z = self.up(self.norm(x))
        y = self.read(z)
        z.mul_(1.5)
        return x + self.down(y) + z

    def read(self, z: Tensor) -> Tensor:
        return self.act(z)


class OfFunction(OfComposed):
    def read(self, z: Tensor) -> Tensor:
        return pure(z)


class OfGated(OfComposed):
    def __init__(self) -> None:
        super().__init__()
        self.act = Gated()

    def read(self, z: Tensor) -> Tensor:
        return self.act(self.down(z * 1.0), z)


class OfGate(OfComposed):
    def read(self, z: Tensor) -> Tensor:
        return self.act(z) * self.up(z * 1.0)


class Model(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed, self.blocks, self.last = nn.Linear(8, WIDTH), nn.ModuleList([block(), block()]), bare_norm()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


CHANGES: dict[str, Change] = {
    "scaled": lambda h: h.mul_(1.5),
    "rows": lambda h: h[:, :2].zero_(),
    "view": lambda h: h.view(-1, WIDTH)[3:].add_(1),
}


def gradient(model: nn.Module, x: Tensor, change: Change = lambda y: None) -> Tensor:
    y = model(x)
    change(y)
    return torch.cat([each.flatten() for each in torch.autograd.grad(y.square().sin().sum(), [*model.parameters()])])


def compare(block: Callable[[], nn.Module], recipe: str, change: Change = lambda y: None, hooked: bool = False) -> None:
    torch.manual_seed(0)
    stock, x = Model(block).double(), torch.randn(*BATCH, 8, dtype=torch.float64)
    patched = memopt.patch(copy.deepcopy(stock), recipe, inputs={"x": x})
    if hooked:
        for model in (stock, patched):
            model.blocks[0].norm.register_forward_hook(lambda _, given, y: y.mul_(1.5))
    assert torch.allclose(gradient(patched, x, change), gradient(stock, x, change), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("block", [Normed, Late])
def test_a_block_may_change_the_output_of_a_norm_without_weights(block, change, recipe):
    compare(lambda: block(CHANGES[change]), recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_hook_may_change_the_output_of_a_norm_without_weights(recipe):
    compare(lambda: Normed(lambda h: None), recipe, hooked=True)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_caller_may_change_what_a_model_returns(change, recipe):
    compare(lambda: Normed(lambda h: None), recipe, CHANGES[change])


def test_a_pooling_in_place_behind_a_model_of_transformers():
    ids, mask = torch.arange(12).view(2, 6), torch.ones(2, 6, dtype=torch.long)
    mask[1, 3:] = 0
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "eos_token_id": 1, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    stock = OlmoForCausalLM(OlmoConfig(**sizes, num_attention_heads=2, pad_token_id=0))
    patched = memopt.patch(copy.deepcopy(stock))
    for model in (stock, patched):
        hidden = model.model(ids, attention_mask=mask).last_hidden_state
        hidden[mask == 0] = 0.0
        (hidden.sum(1) / mask.sum(1, keepdim=True)).square().sum().backward()
    for ours, theirs in zip(patched.model.parameters(), stock.model.parameters(), strict=True):
        # Two blocks of some ten operations, each of which may round otherwise.
        assert (ours.grad - theirs.grad).norm() <= 32 * torch.finfo(torch.float32).eps * theirs.grad.norm()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("block", [OfComposed, OfFunction, OfGated, OfGate])
def test_a_block_may_change_what_its_modules_and_functions_have_read(block, recipe):
    compare(block, recipe)


def test_a_copy_is_made_only_where_the_output_may_change(monkeypatch):
    copied: list[bool] = []
    module = sys.modules["memopt.patches.norm.module"]
    norm = module.ms_norm
    monkeypatch.setattr(
        module, "ms_norm", lambda *args, **options: copied.append(options["copies_output"]) or norm(*args, **options)
    )
    compare(lambda: Normed(lambda h: None), "exact-unfolded")
    assert copied == [False, False, True]


def test_what_runs_again_is_left_alone_only_where_its_input_changes():
    def actions(block: type[OfComposed]) -> set[str]:
        plan = memopt.plan_for(Model(block), inputs={"x": torch.randn(*BATCH, 8)})
        return {entry.action for entry in plan.entries if entry.site.endswith(".act")}

    class Unchanged(OfComposed):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(self.act(self.up(self.norm(x))))

    assert actions(Unchanged) == {"recompute"}
    assert "recompute" not in actions(OfComposed)
