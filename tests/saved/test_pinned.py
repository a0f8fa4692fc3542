"""Small views let go of the large storages behind them: same gradients, fewer bytes, nobody else affected."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memopt.saved import RecomputeScope, kept, pinned
from memopt.trace.account import account, live_bytes

TOKENS, WIDTH, HEADS = 6, 8, 2


class FusedAttention(nn.Module):
    """Queries and keys are rotated, which makes new tensors of them; the values stay a view."""

    def __init__(self, *, scoped: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.mlp = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scoped = scoped
        self.seen: list[Tensor] = []
        self.keeps_projection = False

    def attend(self, x: Tensor) -> Tensor:
        projected = self.qkv(x)
        if self.keeps_projection:
            self.seen.append(projected)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in projected.chunk(3, -1))
        y = F.scaled_dot_product_attention(q * 0.5, k * 2.0, v)
        return self.out(y.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        with RecomputeScope() if self.scoped else nullcontext():
            h: Tensor = self.attend(x)
            return self.mlp(h) * 1.0


def _pair() -> tuple[FusedAttention, FusedAttention, Tensor]:
    torch.manual_seed(0)
    stock = FusedAttention(scoped=False)
    scoped = copy.deepcopy(stock)
    scoped.scoped = True
    return stock, scoped, torch.randn(1, TOKENS, WIDTH, requires_grad=True)


def _gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()]))


QUERIES_AND_KEYS = 2 * TOKENS * WIDTH * 4


def test_the_values_of_a_fused_projection_are_kept_alone() -> None:
    stock, scoped, x = _pair()
    saved = live_bytes(lambda: stock(x)) - live_bytes(lambda: scoped(x))
    assert saved == QUERIES_AND_KEYS
    for one, other in zip(_gradients(stock, x), _gradients(scoped, x), strict=True):
        assert torch.equal(one, other)


def test_reports_count_what_is_left() -> None:
    _, scoped, x = _pair()
    assert account(scoped, lambda: scoped(x)).total == live_bytes(lambda: scoped(x))


def test_a_projection_that_somebody_else_holds_is_not_copied() -> None:
    _, scoped, x = _pair()
    scoped.keeps_projection = True
    loss = scoped(x).square().sum()
    storage = scoped.seen[0].untyped_storage()
    values = next(
        t for t in _saved_values(loss) if t.shape == (1, HEADS, TOKENS, WIDTH // HEADS) and _inside(t, storage)
    )
    assert values.untyped_storage().data_ptr() == storage.data_ptr()


def _saved_values(loss: Tensor) -> list[Tensor]:
    """Values that attention keeps, wherever it is in the graph of `loss`."""
    found, nodes = [], [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node.name().startswith("ScaledDotProduct"):
            found.append(node._saved_value)
        nodes += [edge for edge, _ in node.next_functions] if node is not None else []
    return found


def _inside(tensor: Tensor, storage: torch.UntypedStorage) -> bool:
    return storage.data_ptr() <= tensor.data_ptr() < storage.data_ptr() + storage.nbytes()


def test_without_the_count_of_references_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    stock, scoped, x = _pair()
    monkeypatch.setattr(pinned, "storage_use_count", lambda identity: math.inf)
    assert live_bytes(lambda: scoped(x)) == live_bytes(lambda: stock(x))


def test_where_functions_cannot_be_distinguished_from_operations_nothing_is_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stock, scoped, x = _pair()
    monkeypatch.setattr(kept, "APPLY", None)
    monkeypatch.setattr(kept, "may_apply", lambda frame: True)
    assert live_bytes(lambda: scoped(x)) == live_bytes(lambda: stock(x))


def test_checkpointing_around_a_scope_keeps_what_it_keeps() -> None:
    stock, scoped, x = _pair()

    def checkpointed(model: nn.Module) -> list[Tensor]:
        y = checkpoint(model, x, use_reentrant=False)
        return list(torch.autograd.grad(y.square().sum(), [x, *model.parameters()]))

    for one, other in zip(checkpointed(stock), checkpointed(scoped), strict=True):
        assert torch.equal(one, other)


def test_a_change_in_place_before_the_copy_is_still_an_error() -> None:
    weight = torch.randn(WIDTH, 3 * WIDTH, requires_grad=True)
    with RecomputeScope():
        projected = torch.randn(TOKENS, WIDTH) @ weight
        part = projected[:, :WIDTH]
        y = part * part.exp()
        part.add_(1.0)
        del part, projected
        loss = (y * 2.0).square().sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_one_view_that_two_operations_keep_is_copied_once() -> None:
    weight = torch.randn(WIDTH, 4 * WIDTH, requires_grad=True)
    x = torch.randn(TOKENS, WIDTH)

    def run(scope: bool) -> Tensor:
        def part() -> Tensor:
            view = (x @ weight)[:, :WIDTH]
            return view.sin() + view.cos()

        with RecomputeScope() if scope else nullcontext():
            return part().tanh()

    # The storage of all four parts, against one part, beside what tanh keeps.
    assert live_bytes(lambda: run(False)) - live_bytes(lambda: run(True)) == 3 * TOKENS * WIDTH * 4
    expected, actual = (torch.autograd.grad(run(scope).sum(), weight)[0] for scope in (False, True))
    assert torch.equal(expected, actual)


@pytest.mark.parametrize(("kept", "copied"), [(2, True), (3, True), (4, False)])
def test_a_large_part_is_not_worth_a_copy(kept: int, copied: bool) -> None:
    weight = torch.randn(WIDTH, 4 * WIDTH, requires_grad=True)
    x = torch.randn(TOKENS, WIDTH)

    def run(scope: bool) -> Tensor:
        with RecomputeScope() if scope else nullcontext():
            y = (x @ weight)[:, : kept * WIDTH].sin()
            return y * 2.0

    assert (live_bytes(lambda: run(False)) > live_bytes(lambda: run(True))) == copied


class _Keeper:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def keep(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_many_storages_do_not_pile_up() -> None:
    pins = pinned.PinnedStorages()
    tensors = [torch.randn(4, 4, requires_grad=True) * 1.0 for _ in range(3 * pinned.WATCHED)]

    keepers = [_Keeper(tensor[:1].detach()) for tensor in tensors]
    for keeper, tensor in zip(keepers, tensors, strict=True):
        pins.saved(keeper, tensor[:1])
    assert len(pins._watched) == pinned.WATCHED


def test_what_a_function_of_somebody_else_keeps_has_the_strides_it_had() -> None:
    strides: list[tuple[int, ...]] = []

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            strides.append(x.stride())
            return x * x

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            strides.append(ctx.saved_tensors[0].stride())
            return 2 * ctx.saved_tensors[0] * dy

    weight = torch.randn(WIDTH, 4 * WIDTH, requires_grad=True)
    with RecomputeScope():
        y = Square.apply((torch.randn(TOKENS, WIDTH) @ weight)[:, :WIDTH]) * 2.0
        loss = y.square().sum()
    loss.backward()
    assert strides == [(4 * WIDTH, 1)] * 2


def test_the_order_of_strides_stays() -> None:
    pins = pinned.PinnedStorages()
    base = torch.randn(4, 5, 6, requires_grad=True) * 1.0
    keeper = _Keeper(base[:, :2].permute(2, 0, 1).detach())
    pins.saved(keeper, base[:, :2].permute(2, 0, 1))
    del base
    pins.settle()
    assert keeper.tensor.stride() == (1, 12, 6)
