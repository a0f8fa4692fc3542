"""Checkpointed blocks that the model's code conditions by attributes: each call's second run reads those of its first.

Models hand a block its timestep, a context or features of an image by an attribute, and clear it later. A block may
also leave state for its next call, which the model clears behind the last one.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.patches.checkpointing.module import patch_block

WIDTH = 8


class Condition(NamedTuple):
    c: Tensor


def _set_in(name: str, wrap: Callable[[Tensor], Any] = lambda c: c) -> Callable[[Any, Tensor | None], None]:
    def set_(block: Any, c: Tensor | None) -> None:
        setattr(block, name, None if c is None else wrap(c))

    return set_


#: Kind -> (how the model sets a condition, or clears it with None; how the block reads it).
KINDS: dict[str, tuple[Callable[[Any, Any], None], Callable[[Any], Any]]] = {
    "tensor": (_set_in("condition"), lambda block: block.condition),
    "tensor without gradient": (_set_in("condition", Tensor.detach), lambda block: block.condition),
    "tensor of a child": (lambda block, c: setattr(block.act, "condition", c), lambda block: block.act.condition),
    "number": (_set_in("condition", lambda c: float(c.detach().mean())), lambda block: block.condition),
    "tuple": (_set_in("condition", lambda c: (c, 2.0)), lambda block: block.condition and block.condition[0]),
    "list": (_set_in("condition", lambda c: [c]), lambda block: block.condition and block.condition[0]),
    "dictionary": (lambda block, c: block.box.update(condition=c), lambda block: block.box.get("condition")),
    "new key": (
        lambda block, c: block.box.pop("c", None) if c is None else block.box.update(c=c),
        lambda block: block.box.get("c"),
    ),
    "another object": (
        _set_in("condition", lambda c: types.SimpleNamespace(c=c)),
        lambda block: block.condition and block.condition.c,
    ),
    "named tuple": (_set_in("condition", Condition), lambda block: block.condition and block.condition.c),
    "function": (_set_in("condition", lambda c: lambda: c), lambda block: block.condition and block.condition()),
    "object": (lambda block, c: setattr(block.object, "condition", c), lambda block: block.object.condition),
    "new attribute": (
        lambda block, c: vars(block).pop("fresh", None) if c is None else setattr(block, "fresh", c),
        lambda block: getattr(block, "fresh", None),
    ),
}


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, 8)
        self.scale = nn.Linear(WIDTH, WIDTH)
        self.kind, self.condition, self.act.condition = kind, None, None
        self.box: dict[str, Any] = {}
        self.object = types.SimpleNamespace(condition=None)

    def forward(self, x: Tensor) -> Tensor:
        condition = KINDS[self.kind][1](self)
        if condition is not None:
            x = x + torch.sigmoid(self.scale(x * condition)) * condition
        return x + self.down(self.act(self.up(self.norm(x))))


class Conditioned(nn.Module):
    """Runs its blocks twice, with another condition each time."""

    def __init__(self, kind: str, clears: str) -> None:
        super().__init__()
        self.embed, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block(kind) for _ in range(3))
        self.kind, self.clears, self.is_off = kind, clears, False

    def condition(self, condition: Tensor | None) -> None:
        for layer in self.layers:
            KINDS[self.kind][0](layer, condition)

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for size in (1.0, 3.0):
            self.condition(None if self.is_off else self.embed(x * size).tanh())
            y = x
            for layer in self.layers:
                y = layer(y)
            outputs.append(y)
            if self.clears == "each":
                self.condition(None)
        if self.clears == "end":
            self.condition(None)
        return outputs[0] * outputs[1]


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    model(x).sin().sum().backward()
    of_parameters = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    assert x.grad is not None
    return [x.grad, *of_parameters]


#: Whether each step leaves out the condition, as training for guidance without a classifier does in some.
STEPS = {"late": (True, True, True, False, False, True, False), "early": (False, False, False, True, False)}


@pytest.mark.parametrize("comes", STEPS)
@pytest.mark.parametrize("clears", ["each", "end", "never"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_call_has_the_gradients_of_its_own_condition(kind: str, clears: str, comes: str) -> None:
    torch.manual_seed(0)
    stock = Conditioned(kind, clears).double().train()
    ours = copy.deepcopy(stock)
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    memopt.patch(ours, recipe="exact-levels", inputs={"x": x})
    assert "2 checkpointed" in str(memopt.summary(ours))
    for is_off in STEPS[comes]:
        stock.is_off = ours.is_off = is_off
        for found, wanted in zip(gradients(ours, x), gradients(stock, x), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


class Padding(nn.Module):
    """Puts the end of its last input before its input, as causal convolutions of videos do; the model clears it."""

    def __init__(self, *, detaches: bool) -> None:
        super().__init__()
        self.linear, self.end, self.detaches = nn.Linear(WIDTH, WIDTH), None, detaches

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(torch.cat([x[:, :1] if self.end is None else self.end, x], 1))[:, :-1]
        self.end = x[:, -1:].detach().clone() if self.detaches else x[:, -1:].clone()
        return y


class Padded(nn.Module):
    def __init__(self, *, detaches: bool, times: int) -> None:
        super().__init__()
        parts = [[Padding(detaches=detaches), nn.GELU(), Padding(detaches=detaches)] for _ in range(2)]
        self.layers, self.times = nn.ModuleList(nn.Sequential(*each) for each in parts), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            for layer in self.layers:
                x = layer(x)
        for layer in self.layers:
            layer[0].end = layer[2].end = None
        return x


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("detaches", [False, True])
def test_state_that_the_model_clears_behind_its_blocks_stays_clear(detaches: bool, times: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    stock = Padded(detaches=detaches, times=times).double().train()
    ours = copy.deepcopy(stock)
    for layer in ours.layers:
        patch_block(layer, None, True, None)
    for _ in range(3):
        for found, wanted in zip(gradients(ours, x), gradients(stock, x), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)
        assert all(layer[0].end is None and layer[2].end is None for layer in ours.layers)
