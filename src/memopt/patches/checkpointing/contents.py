"""The contents of containers and objects among a block's arguments, as the block's first run found them.

A forward may add to a list that lies in a dictionary, or count in an object that all blocks get. Containers that are
arguments themselves are copied for the second run (`memopt.patches.rerun.copied`); everything inside them is here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from memopt.patches.rerun import CONTAINERS
from memopt.recompute.pure import attributes_of

#: Levels of containers and objects inside one another that are searched.
_DEPTH = 4


class Contents:
    """The contents of the containers and objects in `values`, at any place inside them. Tensors are not copied, and
    caches are left alone: `without_caches` decides about them."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._found: dict[int, tuple[Any, list[Any]]] = {}
        """Id of a container, or of the table of an object's attributes -> it, and its items."""
        self.tensors: list[Tensor] = []
        """The tensors that objects hold."""
        self._add(values, _DEPTH, of_object=False)

    def _add(self, values: Iterable[Any], depth: int, of_object: bool) -> None:
        for value in values:
            if isinstance(value, Tensor):
                self.tensors += [value] if of_object else []
                continue
            is_object = not isinstance(value, (tuple, *CONTAINERS))
            held = attributes_of(value) if is_object else value
            if held is None or isinstance(value, Cache) or not depth or id(held) in self._found:
                continue
            if not isinstance(held, tuple):
                self._found[id(held)] = held, _items(held)
            inside = held.values() if isinstance(held, dict) else held
            self._add(list(inside), depth - 1, of_object or is_object)

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Inside, everything holds what it held at first; afterwards, what it held before."""
        now = [(held, _items(held)) for held, _ in self._found.values()]
        try:
            for held, items in self._found.values():
                _fill(held, items)
            yield
        finally:
            for held, items in now:
                _fill(held, items)


def _items(held: Any) -> list[Any]:
    return [*held, *held.values()] if isinstance(held, dict) else [*held]


def _fill(held: Any, items: list[Any]) -> None:
    now = _items(held)
    if len(now) == len(items) and all(map(is_, now, items)):
        return
    if isinstance(held, dict):
        kind: Any = OrderedDict if isinstance(held, OrderedDict) else dict  # ModelOutput forbids methods of its own
        kind.clear(held)
        for name, value in zip(items[: len(items) // 2], items[len(items) // 2 :], strict=True):
            kind.__setitem__(held, name, value)
    elif isinstance(held, set):
        held.clear()
        held.update(items)
    else:
        held.clear()
        held.extend(items)


def tensors_in(values: Sequence[Any]) -> list[Tensor]:
    """The tensors in `values`, and in containers nested in them."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    for value in values:
        if isinstance(value, (tuple, *CONTAINERS)):
            tensors += tensors_in([*value.values()] if isinstance(value, dict) else [*value])
    return tensors
