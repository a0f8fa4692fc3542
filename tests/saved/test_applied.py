"""Functions of `torch.autograd.Function` are told from operations by the code that calls them."""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Callable
from functools import partial, reduce
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from memopt.saved import RecomputeScope, kept
from memopt.saved.kept import may_apply
from memopt.saved.scope import packing_unseen
from tests.saved.builders import WritesIntoWhatItKept

X = torch.randn(2, 3, 4, requires_grad=True)
ALIAS = WritesIntoWhatItKept.apply
#: Without the frame of `Function.apply`, as from PyTorch 2.14 on: the frame is the caller's.
APPLY = super(torch.autograd.Function, WritesIntoWhatItKept).apply
HOLDER = SimpleNamespace(apply_it=ALIAS, softmax=ALIAS)
CONTEXT = contextvars.copy_context()


def _in_a_variable() -> Tensor:
    apply = WritesIntoWhatItKept.apply
    return apply(X)


def _of_a_loop() -> list[Tensor]:
    return [each for each in map(ALIAS, [X])]  # noqa: C416 - the loop is what calls


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x + y


class _Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.softmax = ALIAS

    def forward(self, x: Tensor) -> Any:
        return self.softmax(x)


class _AmongVariables(nn.Module):
    """Calls a function as an attribute, right after it loads or stores another variable."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.softmax, self.form = APPLY, form

    def forward(self, x: Tensor) -> Any:
        if self.form == "operator":
            d = x.detach()
            return d + self.softmax(x)
        if self.form == "store":
            y = x
            return self.softmax(y)
        return (x, self.softmax(x))


class _Subclass(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.sin:
            return WritesIntoWhatItKept.apply(X)
        return super().__torch_function__(func, types, args, kwargs or {})


def _added() -> list[Tensor]:
    found: list[Tensor] = []
    found += map(ALIAS, [X])
    return found


def _assigned() -> list[Tensor]:
    found: list[Tensor] = []
    found[:] = map(ALIAS, [X])
    return found


FUNCTIONS: dict[str, Callable[[], Any]] = {
    "by its class": lambda: WritesIntoWhatItKept.apply(X),
    "with a tuple": lambda: WritesIntoWhatItKept.apply(*(X,)),
    "of a branch": lambda: WritesIntoWhatItKept.apply(X if X.ndim else X[0]),
    "of a call": lambda: WritesIntoWhatItKept.apply(X.mul(X.exp())),
    "as a global": lambda: ALIAS(X),
    "as an attribute": lambda: HOLDER.apply_it(X),
    "by a name of tensors": lambda: HOLDER.softmax(X),
    "as a variable": _in_a_variable,
    **{f"after a variable ({form})": partial(_AmongVariables(form), X) for form in ("operator", "store", "tuple")},
    "bound": lambda: partial(ALIAS, X)(),
    "mapped": lambda: list(map(ALIAS, [X])),
    "in a loop": _of_a_loop,
    "added": _added,
    "assigned": _assigned,
    "reduced": lambda: reduce(_Pair.apply, [X, X]),
    "in a context": lambda: CONTEXT.run(ALIAS, X),
    "of a module": lambda: _Module()(X),
    "of a subclass": lambda: torch.sin(torch.ones(2).as_subclass(_Subclass)),
}
OPERATIONS: dict[str, Callable[[], Any]] = {
    "operator": lambda: X * X,
    "method": lambda: X.transpose(1, 2).contiguous().matmul(X.reshape(2, 4, 3).transpose(1, 2)),
    "function": lambda: torch.matmul(X, X.transpose(-1, -2)),
    "keywords": lambda: F.scaled_dot_product_attention(X, X, X, is_causal=True, scale=X.shape[-1] ** -0.5),
    "list": lambda: torch.cat([X * X, X.exp()], dim=-1),
    "module": lambda: nn.Linear(4, 4)(X),
    "padded": lambda: F.pad(X, (1, 0)) * X.new_ones(5),
    "operator's name": lambda: torch.ops.aten.mul(X, X),
    "index": lambda: X[X > 0] * 2.0,
}


def _savers(do: Callable[[], Any]) -> list[bool]:
    """For each tensor that is saved, whether a function may have saved it, by the code alone."""
    found: list[bool] = []

    def pack(tensor: Tensor) -> Tensor:
        frame = sys._getframe().f_back
        assert frame is not None
        found.append(may_apply(frame))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        do()
    return found


@pytest.mark.parametrize("do", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_function_is_never_taken_for_an_operation(do: Callable[[], Any]) -> None:
    assert _savers(do)[-1]


@pytest.mark.parametrize("do", OPERATIONS.values(), ids=OPERATIONS)
def test_an_operation_is_known_to_be_one(do: Callable[[], Any]) -> None:
    assert _savers(do)
    assert not any(_savers(do))


class _LooksOn(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_mode_calls_no_function() -> None:
    with _LooksOn():
        assert not any(_savers(lambda: X * X.exp()))


@pytest.mark.parametrize("by_code", [False, True])
@pytest.mark.parametrize("unseen", [False, True])
def test_a_function_that_writes_into_what_it_kept_does_not_write_into_what_others_read(
    unseen: bool, by_code: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From PyTorch 2.14 on the code is all there is to go by."""
    if by_code:
        monkeypatch.setattr(kept, "APPLY", None)
    leaf = torch.randn(2, 6, 4, requires_grad=True)

    def gradient(scoped: bool) -> Tensor:
        with RecomputeScope() if scoped else torch.enable_grad():
            copy = torch.sigmoid(leaf).clone()  # would be recomputed as an alias of what sigmoid keeps
            with packing_unseen() if scoped and unseen else torch.enable_grad():
                written = WritesIntoWhatItKept.apply(copy)
            return torch.autograd.grad(written.sum(), leaf)[0]

    assert torch.equal(gradient(True), gradient(False))
