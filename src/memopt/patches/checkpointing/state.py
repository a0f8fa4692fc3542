"""What a block's forward finds, in the block and in its arguments, so that its second run finds the same.

Weights, buffers and attributes that were exchanged since (`torch.func.functional_call` lends weights) are put back for
the second run, and so are copies of what the forward itself changes in place. Other changes in place are an error.
"""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from memopt.patches.checkpointing.decisions import Decisions
from memopt.patches.repeated import ABSENT, MODES, Slot, has_memory, standing
from memopt.patches.swap import is_watched
from memopt.saved.kept import check_version

#: Calls in which all of a block's state is looked at: the first may make some of it.
_LOOKS = 2
#: Numbers in the largest buffer that is copied where the forward changes it in place.
_LARGEST_COPY = 1 << 20
_CONTAINERS = (list, dict, set, deque)
_NUMBERS = (int, float, str)
_PLAIN = (type(None), bool, tuple, *_NUMBERS)
#: Objects that hold objects: so many levels of them are looked at.
_DEPTH = 3
_VERSION = attrgetter("_version")
_OF_EVERY_MODULE = frozenset({*vars(nn.Module()), "_memopt"})


class BlockState:
    """Where one block holds state, and which of it its forward changes. A copy of the block starts with none."""

    def __init__(self) -> None:
        self._children: list[dict[str, Any]] = []
        self._tables: list[dict[str, Any]] = []
        """Parameters and buffers of each module, which keeps its tables for life."""
        self._parts, self._size = [None], 0
        self.moving: set[tuple[int, str]] = set()
        self.slots: list[Slot] = []
        self.looks, self.decides, self._checked = 0, False, 0

    def __reduce__(self) -> tuple[Any, ...]:
        return BlockState, ()

    def learn(self, block: nn.Module) -> None:
        """Look up where `block` holds state, if its modules or the number of its tensors have changed."""
        parts = list(chain.from_iterable(map(dict.values, self._children)))
        if parts == self._parts and sum(map(len, self._tables)) == self._size:
            return
        modules = list(block.modules())
        self._children = [module._modules for module in modules]
        self._parts = list(chain.from_iterable(map(dict.values, self._children)))
        self._tables = [table for module in modules for table in (module._parameters, module._buffers)]
        self._size, self.looks, self.moving = sum(map(len, self._tables)), 0, set()
        self.decides = False
        self.slots = [(table, name) for table in self._tables for name, held in table.items() if held is not None]
        inside: dict[int, dict[Any, Any]] = {}
        for module in modules:
            own = vars(module)
            # Engines keep counters of their own on the modules that they hook.
            looked_at = MODES if is_watched(module) else (*MODES, *own.keys() - _OF_EVERY_MODULE)
            self.slots += [(own, name) for name in looked_at if name in own and _is_state(own[name])]
            _add_tables(inside, [own[name] for name in looked_at if name in own])
        self._checked = len(self.slots)
        self.slots += [(table, name) for table in inside.values() for name, held in table.items() if _is_state(held)]

    def has_run(self, moved: Sequence[Slot]) -> None:
        """The forward has changed what these hold."""
        self.looks += 1
        self.moving.update((id(table), name) for table, name in moved)
        if self.looks == _LOOKS:
            self.slots = [slot for place, slot in enumerate(self.slots) if self.is_read(place, *slot)]
            self._checked = len(self.slots)

    def is_read(self, place: int, table: dict[Any, Any], name: Any) -> bool:
        """Whether the value in a slot counts: any tensor of a module, and elsewhere what the forward has changed."""
        held = name in MODES or isinstance(table.get(name), Tensor)
        return (id(table), name) in self.moving or (held and place < self._checked)


class RunsTwice:
    """One call of a block's forward, which runs now and again in backward."""

    def __init__(self, state: BlockState, block: nn.Module, function: Callable[..., Any], given: Sequence[Any]) -> None:
        state.learn(block)
        self._state, self._block, self._function, self._slots = state, block, function, state.slots
        named = getattr(function, "keywords", {})
        self._given = (
            [_copied(value) for value in given],
            {name: _copied(value) for name, value in named.items() if isinstance(value, _CONTAINERS)},
        )
        # PyTorch's checkpoint checks the versions of tensors that are given by position.
        self._arguments = _tensors_in([*named.values(), *(value for value in given if not isinstance(value, Tensor))])
        self._found: list[Any] | None = None

    def __call__(self, *args: Any) -> Any:
        if self._found is None:
            return self._first(*args)
        lent = self._lent()
        positional, named = self._given
        args = tuple(
            value if isinstance(value, Tensor) else _copied(mine) for value, mine in zip(args, positional, strict=True)
        )
        function = functools.partial(self._function, **{name: _copied(value) for name, value in named.items()})
        with standing(lent), nullcontext() if self._decisions is None else self._decisions.repeat():
            return function(*args)

    def _first(self, *args: Any) -> Any:
        state = self._state
        looks = state.looks < _LOOKS
        self._found = _standing_in(self._slots)
        possible = {}
        if looks or state.moving:
            self._found = list(map(_copied, self._found))
            possible = self._possible_copies(looks)
        self._tensors = [value for value in self._found if isinstance(value, Tensor)]
        self._versions, self._given_versions = _versions(self._tensors), _versions(self._arguments)
        self._decisions = Decisions(args) if looks or state.decides else None
        try:
            with self._decisions or nullcontext():
                return self._function(*args)
        finally:
            state.decides |= self._decisions is not None and bool(self._decisions.made)
            after, found = _versions(self._tensors), self._found
            self._copies: dict[int, Tensor] = {}
            if looks or after != self._versions:
                moved = {id(t) for t, a, b in zip(self._tensors, after, self._versions, strict=True) if a != b}
                changed, now = [i for i, value in enumerate(found) if id(value) in moved], _standing_in(self._slots)
                changed += [i for i, value in enumerate(found) if not _is_same(now[i], value)]
                state.has_run([self._slots[i] for i in changed])
                self._copies = {i: possible[i] for i in changed if i in possible}

    def _possible_copies(self, looks: bool) -> dict[int, Tensor]:
        """Of tensors that the forward may be about to change in place."""
        assert self._found is not None
        with torch.no_grad():
            return {
                i: held.detach().clone()
                for i, ((table, name), held) in enumerate(zip(self._slots, self._found, strict=True))
                if isinstance(held, Tensor) and (looks or (id(table), name) in self._state.moving)
                if not isinstance(held, nn.Parameter) and not held.requires_grad and held.numel() <= _LARGEST_COPY
            }

    def _lent(self) -> list[tuple[Slot, Any]]:
        """What has to be put where for the second run.

        Raises:
            RuntimeError: the forward read a tensor that was changed in place since, and there is no copy of it.
        """
        assert self._found is not None
        if _versions(self._arguments) != self._given_versions:
            for tensor, version in zip(self._arguments, self._given_versions, strict=True):
                check_version(tensor, version)
        now, found = _standing_in(self._slots), self._found
        if not self._copies and all(map(is_, now, found)) and _versions(self._tensors) == self._versions:
            return []
        lent: list[tuple[Slot, Any]] = []
        versions = iter(zip(_versions(self._tensors), self._versions, strict=True))
        for i, (slot, value) in enumerate(zip(self._slots, found, strict=True)):
            version, expected = next(versions) if isinstance(value, Tensor) else (0, 0)
            if i in self._copies:
                lent.append((slot, self._copies[i].clone()))  # a graph that is retained runs the block once more
            elif isinstance(value, Tensor) and now[i] is not value and not has_memory(value):
                continue  # sharding frees the weights of a forward
            elif version != expected and self._state.is_read(i, *slot):
                raise RuntimeError(self._changed(slot, value, expected))
            elif not _is_same(now[i], value):
                lent.append((slot, _copied(value)))
        return lent

    def _changed(self, slot: Slot, held: Tensor, version: int) -> str:
        named = self._block.named_modules()
        owner = next((n for n, m in named if any(slot[0] is t for t in (m._parameters, m._buffers, vars(m)))), "")
        where = ".".join(filter(None, (type(self._block).__name__, owner)))
        return (
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"'{slot[1]}' {list(held.shape)} of {where} is at version {held._version}; expected version {version} "
            "instead, because the block is checkpointed and runs again in backward. Change weights after backward; if "
            "the block's own forward changes them, leave the block out of checkpointing.blocks."
        )


def _is_state(value: Any) -> bool:
    # A tensor with a graph is a result of the last call: to hold it would keep that graph alive.
    if isinstance(value, Tensor):
        return not value.requires_grad
    return type(value) in _PLAIN or isinstance(value, _CONTAINERS)


def _add_tables(found: dict[int, dict[Any, Any]], values: Iterable[Any], depth: int = _DEPTH) -> None:
    """Add the dictionaries and the attributes of objects in `values`, by their id, and those inside them."""
    for value in values:
        if isinstance(value, (list, tuple)):
            _add_tables(found, value, depth - 1)
            continue
        is_other = isinstance(value, (Tensor, nn.Module, type)) or callable(value)
        table = value if isinstance(value, dict) else {} if is_other else getattr(value, "__dict__", {})
        if table and depth and id(table) not in found:
            found[id(table)] = table
            _add_tables(found, table.values(), depth - 1)


def _copied(value: Any) -> Any:
    """`value`, or a copy of it where it is a container, which may be changed in place."""
    if type(value) is list:
        return list(map(_copied, value))
    return copy.copy(value) if isinstance(value, _CONTAINERS) else value


def _is_same(a: Any, b: Any) -> bool:
    if a is b or type(a) is not type(b):
        return a is b
    if isinstance(a, _CONTAINERS):
        values = [[*each, *each.values()] if isinstance(each, dict) else each for each in (a, b)]
        return len(a) == len(b) and all(map(_is_same if type(a) is list else is_, *values))
    return type(a) in _NUMBERS and bool(a == b)


def _standing_in(slots: Sequence[Slot]) -> list[Any]:
    return [table.get(name, ABSENT) for table, name in slots]


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    try:
        return list(map(_VERSION, tensors))
    except RuntimeError:  # tensors of inference have none
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _tensors_in(values: Sequence[Any]) -> list[Tensor]:
    """Those in nested containers too."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    for value in values:
        if isinstance(value, (tuple, *_CONTAINERS)):
            tensors += _tensors_in([*value.values()] if isinstance(value, dict) else [*value])
    return tensors
