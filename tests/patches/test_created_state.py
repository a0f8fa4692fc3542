"""State that a checkpointed block's forward creates: the second run of that call does not find it either."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt.patches.checkpointing.module import patch_block
from tests.patches.twice import assert_same
from tests.support.compare import gradients_of


def _attribute(block: Block) -> float:
    if hasattr(block, "seen"):
        return 1.0
    block.seen = True
    return 0.5


def _buffer(block: Block) -> float:
    if block.scale is not None:
        return 1.0
    block.scale = torch.ones(())
    return 0.5


def _none(block: Block) -> float:
    if block.held is not None:
        return 1.0
    block.held = types.SimpleNamespace()
    return 0.5


def _of_an_object(block: Block) -> float:
    if hasattr(block.object, "seen"):
        return 1.0
    block.object.seen = True
    return 0.5


def _key(block: Block) -> float:
    if "seen" in block.table:
        return 1.0
    block.table["seen"] = 1
    return 0.5


def _key_for_each_call(block: Block) -> float:
    block.table[len(block.table)] = 1
    return 1.0 / len(block.table)


def _parameter(block: Block) -> Tensor:
    if block.gain is None:
        block.gain = nn.Parameter(torch.full((8,), 0.5, dtype=torch.float64))
    return block.gain


def _child(block: Block) -> Tensor:
    if not hasattr(block, "late"):
        block.late = nn.Linear(8, 8, bias=False).double()
    return block.late.weight.sum(0)


KINDS: dict[str, Callable[[Any], Any]] = {
    "attribute": _attribute,
    "buffer": _buffer,
    "attribute that was None": _none,
    "attribute of an object": _of_an_object,
    "key": _key,
    "key for each call": _key_for_each_call,
    "parameter": _parameter,
    "child": _child,
}


class Block(nn.Module):
    seen: bool
    scale: Tensor | None
    late: nn.Linear

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.object, self.held = kind, types.SimpleNamespace(), None
        self.table: dict[Any, int] = {}
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("scale", None)
        self.register_parameter("gain", None)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x * KINDS[self.kind](self)))))


@pytest.mark.parametrize("backwards", ["in order", "both at the end"])
@pytest.mark.parametrize("kind", KINDS)
def test_state_that_a_forward_creates(kind: str, backwards: str) -> None:
    torch.manual_seed(0)
    stock = nn.Sequential(*(Block(kind) for _ in range(2))).double()
    ours = copy.deepcopy(stock)
    for block in ours:
        patch_block(block, None, True, None)
    x = torch.linspace(-1, 1, 2 * 5 * 8, dtype=torch.float64).view(2, 5, 8).sin()
    found = []
    for model in (ours, stock):
        torch.manual_seed(1)
        if backwards == "in order":
            found.append([gradients_of(model, model(x.clone().requires_grad_()).square().sum()) for _ in range(4)])
        else:
            losses = [model(x.clone().requires_grad_()).square().sum() for _ in range(3)]
            found.append([gradients_of(model, loss) for loss in losses])
    for mine, theirs in zip(*found, strict=True):
        assert_same(mine, theirs)
    left, right = ([_state(block) for block in model] for model in (ours, stock))
    assert left == right


def _state(block: Any) -> list[Any]:
    names = sorted(name for name in vars(block) if not name.startswith("_memopt"))
    return [names, block.table, str(block.object), block.held]
