"""Records where the Python code of a forward decides by values or sizes of tensors; can invert decisions by values.

A `Decisions` mode sees every read of a value or a size. It returns a subclass of int or float that computes like the
number and records each comparison. A decision by a value can be inverted (`turned`). A comparison of sizes is recorded
with both of its numbers, so that `memopt.walk.flow.branches` can find a length with the other outcome.
"""

from __future__ import annotations

import operator
import sys
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

#: (file, line, bytecode offset): one place where something is decided.
Place = tuple[str, int, int]

_shape_getter: Any = getattr(Tensor.shape, "__get__")  # noqa: B009
_SIZES = {_shape_getter, Tensor.size, Tensor.numel, Tensor.nelement}
_NUMBERS = {Tensor.__int__, Tensor.__float__, Tensor.__index__}
_ANSWERS = {
    Tensor.__bool__, Tensor.is_nonzero, Tensor.equal, Tensor.allclose, torch.is_nonzero, torch.equal, torch.allclose,
}  # fmt: skip
#: How often one place is inverted in one forward: the natural answer may be needed to end a loop.
_LOOPS = 64


@dataclass(frozen=True)
class Comparison:
    """Two numbers, at least one of them a size, that are compared or (``%``) tested for divisibility."""

    place: Place
    operation: str
    left: float
    right: float


class Decisions(TorchFunctionMode):
    """Records the decisions of the forward that runs under it; inverts decisions by values at the places `turned`."""

    def __init__(self, turned: Collection[Place] = ()) -> None:
        super().__init__()
        self.turned = turned
        self.values: dict[Place, set[bool]] = {}
        """Places that decide by a value -> the answers that the forward got there, inverted or not."""
        self.turns: Counter[Place] = Counter()
        self.sizes: list[Comparison] = []

    def __enter__(self) -> Decisions:
        _noting.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _noting.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _SIZES:
            return torch.Size(map(_Size, result)) if isinstance(result, tuple) else _Size(result)
        if func in _ANSWERS or (func is Tensor.item and isinstance(result, bool)):
            return _decided(result, operator.not_)
        if func in _NUMBERS:
            return _decided(result, _across_zero)
        if func is Tensor.item and not isinstance(result, complex):
            return _Value(result) if isinstance(result, int) else _FloatValue(result)
        return result


_noting: list[Decisions] = []


def _decided(natural: Any, other: Callable[[Any], Any]) -> Any:
    """Record and return the answer at this place: `natural`, or ``other(natural)`` if the place is in `turned`."""
    place = _place()
    if not _noting or place is None:
        return natural
    noting, answer = _noting[-1], natural
    if place in noting.turned and noting.turns[place] < _LOOPS:
        noting.turns[place] += 1
        answer = other(natural)
    noting.values.setdefault(place, set()).add(answer > 0)
    return answer


def _across_zero(number: float) -> float:
    return type(number)(0 if number > 0 else 1)


def _place() -> Place | None:
    """The innermost place outside of this file and of torch; None inside of memopt."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name != __name__ and name != "torch" and not name.startswith("torch."):
            break
        frame = frame.f_back
    if frame is None or name.startswith("memopt."):
        return None
    return frame.f_code.co_filename, frame.f_lineno, frame.f_lasti


class _Size(int):
    """A size, or an integer computed from one."""

    def __neg__(self) -> _Size:
        return _Size(-int(self))


class _Value(int):
    """A value read from a tensor."""

    def __int__(self) -> int:
        return int(_decided(int.__int__(self), _across_zero))

    def __bool__(self) -> bool:
        return bool(_decided(int.__bool__(self), operator.not_))


class _FloatValue(float):
    """A value read from a tensor."""

    def __bool__(self) -> bool:
        return bool(_decided(float.__bool__(self), operator.not_))


def _compared(base: type, name: str) -> Callable[[Any, Any], Any]:
    compare = getattr(base, name)

    def method(self: Any, other: Any) -> Any:
        answer = compare(self, other)
        return answer if answer is NotImplemented else _decided(answer, operator.not_)

    return method


def _compared_sizes(name: str) -> Callable[[Any, Any], Any]:
    compare = getattr(int, name)

    def method(self: Any, other: Any) -> Any:
        answer = compare(self, other)
        if answer is NotImplemented and isinstance(other, float):
            answer = getattr(float, name)(float(int(self)), other)
        if answer is not NotImplemented:
            _note(name.strip("_"), int(self), other)
        return answer

    return method


def _computed(name: str) -> Callable[[Any, Any], Any]:
    compute = getattr(int, name)

    def method(self: Any, other: Any) -> Any:
        result = compute(self, other)
        if result is NotImplemented:
            return result
        if name == "__mod__":
            _note("%", int(self), other)
        elif name == "__floordiv__":
            _note("lt", int(self), other)  # then the quotient is 0
        return _Size(result)

    return method


def _note(operation: str, left: float, right: float) -> None:
    place = _place()
    if _noting and place is not None:
        _noting[-1].sizes.append(Comparison(place, operation, left, float(right)))


for _name in ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"):
    setattr(_Size, _name, _compared_sizes(_name))
    setattr(_Value, _name, _compared(int, _name))
    setattr(_FloatValue, _name, _compared(float, _name))
for _name in ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__floordiv__", "__mod__"):
    setattr(_Size, _name, _computed(_name))
