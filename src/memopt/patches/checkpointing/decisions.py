"""The decisions of a block's forward (a router's experts), which its second run repeats; and the states of random
generators beside PyTorch's own, which no checkpoint function sets back for it: Python's and NumPy's, and generators
that modules hold as attributes."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_READS = frozenset({Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__int__, Tensor.__float__})
#: A decision has at most 1 / _PART of the elements of the block's input: a mask of all hidden states is none.
_PART = 16
#: How to read the state of a generator, and how to set it.
Generator = tuple[Callable[[], Any], Callable[[Any], Any]]


class Decisions(TorchFunctionMode):
    """Context manager: stores the decisions of the first forward inside, and repeats them in later ones.

    Decisions are integers and booleans that a forward computes from floating-point numbers. A router chooses a token's
    experts by them (top-k, argmax, sort, a comparison). If two scores almost tie, rounding may decide otherwise in the
    second run, which would then run other experts than the forward did.
    """

    def __init__(self, given: tuple[Any, ...]) -> None:
        super().__init__()
        self.made: list[tuple[Callable[..., Any], list[Any]]] = []
        self._again: Iterator[tuple[Callable[..., Any], list[Any]]] | None = None
        self._largest = max((value.numel() for value in given if _is_float(value)), default=0) // _PART

    def repeat(self) -> Decisions:
        self._again = iter(self.made)
        return self

    def forget(self) -> None:
        """Drop the decisions that are stored so far."""
        self.made.clear()

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        given = (*args, *kwargs.values()) if kwargs else args
        if not any(map(_is_float, given)) or not (function in _READS or self._decides(result)):
            return result
        if self._again is None:
            self.made.append((function, _kept(result)))
            return result
        made_by, made = next(self._again, (None, None))
        if made_by is not function:
            return result
        for each, kept in zip(_parts(result), _parts(made), strict=False):
            if isinstance(each, Tensor) and each.shape == kept.shape:
                each.data.copy_(kept)  # through `.data`: autograd may have saved the tensor, and must see no change
        return made if function in _READS else result

    def _decides(self, result: Any) -> bool:
        parts = _parts(result)
        if not all(isinstance(each, Tensor) and each.numel() <= self._largest for each in parts):
            return False
        return not all(map(_is_float, parts))


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _parts(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _kept(result: Any) -> Any:
    if not isinstance(result, Tensor):
        return tuple(map(_kept, result)) if isinstance(result, tuple) else result
    return result.detach().to(torch.int32) if result.dtype == torch.int64 else result.detach().clone()


def generators_of(modules: Iterable[nn.Module]) -> list[Generator]:
    """Python's and NumPy's generators, and those that `modules` hold."""
    held = {id(value): value for module in modules for value in vars(module).values()}
    found = [_state_of(value) for value in held.values()]
    return [(random.getstate, random.setstate), (np.random.get_state, np.random.set_state), *filter(None, found)]


def drew_from(generators: Sequence[Generator], before: Sequence[Any]) -> list[Generator]:
    """The members of `generators` that are no longer in the states `before`."""
    pairs = zip(generators, before, strict=True)
    return [each for each, state in pairs if pickle.dumps(each[0]()) != pickle.dumps(state)]


@contextmanager
def in_states(generators: Sequence[Generator], states: Sequence[Any]) -> Iterator[None]:
    """Inside, `generators` go on from `states`; afterwards from where they were."""
    now = [read() for read, _ in generators]
    try:
        for (_, write), state in zip(generators, states, strict=True):
            write(state)
        yield
    finally:
        for (_, write), state in zip(generators, now, strict=True):
            write(state)


def _state_of(value: Any) -> Generator | None:
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    if isinstance(value, (torch.Generator, np.random.RandomState)):
        return value.get_state, value.set_state
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return partial(getattr, bits, "state"), partial(setattr, bits, "state")
    return None
