"""The state that a block's forward reads, in the block and in its arguments, restored for its second run.

Weights, buffers and attributes that were replaced since (as `torch.func.functional_call` does) are put back for the
second run. So are tensors that the forward itself changes in place, as copies. Other changes in place are an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from memopt.patches.checkpointing.contents import Contents, tensors_in
from memopt.patches.checkpointing.decisions import Decisions, Generator, drew_from, generators_of, in_states
from memopt.patches.checkpointing.heads import ByHeads
from memopt.patches.checkpointing.kept import KeptAttention
from memopt.patches.rerun import (
    ABSENT,
    CONTAINERS,
    MODES,
    OF_EVERY_MODULE,
    WEIGHTS,
    Held,
    HookTable,
    Slot,
    apart,
    attending_with,
    copied,
    hooks_as_before,
    is_same,
    standing,
    tables_of_hooks,
)
from memopt.patches.swap import Notes, is_watched
from memopt.patches.unseen import Values
from memopt.recompute.pure import attributes_of
from memopt.recompute.versions import changed_in_place, check_version, versions_of
from memopt.torch_compat import BATCH_NORM_CLASSES, kernels_of_attention, stopping_unseen

#: Number of first calls in which all state of a block is observed; the first call may create some of it.
_LOOKS = 2
#: Elements of the largest buffer that is copied in case the forward changes it in place.
_LARGEST_COPY = 1 << 20
#: Items of a table to which other code may add state: larger ones are records, of steps say.
_LARGEST_TABLE = 256
#: Levels of objects inside objects that are searched for state.
_DEPTH = 3
_WHY = (
    ", because the block is checkpointed and runs again in backward. Change {} after backward; if the block's own "
    "forward changes them, leave the block out of checkpointing.blocks"
)
_WHY_GIVEN, _WHY = _WHY.format("its arguments") + ", or pass use_cache=False", _WHY.format("weights")


class BlockState(Notes):
    """The places where one block holds state, and the state that its forward changes."""

    def __init__(self) -> None:
        self._children: list[dict[str, Any]] = []
        self._tables: list[dict[str, Any]] = []
        """The tables of parameters and buffers of each module, which a module never replaces."""
        self._parts, self._size = [None], 0
        self.hooks: list[HookTable] = []
        """The tables of hooks of each module inside, which a module never replaces."""
        self._may_grow: list[dict[Any, Any]] = []
        """Tables in which a forward may create state, beside those of parameters and of children."""
        self._seen, self._grown = set[tuple[int, Any]](), 0
        """Their items that were looked at, and how many there were after the last run."""
        self.moving: set[tuple[int, str]] = set()
        self.written: set[str] = set()
        """Names of the masks among the arguments that the forward changes in place (OneFormer)."""
        self.slots: list[Slot] = []
        self.generators: list[Generator] = []
        """Generators that the forward may draw from; after some calls, those that it drew from."""
        self._drew: list[Generator] = []
        self.looks, self.decides, self._checked = 0, False, 0
        self.is_proved = self._is_compared = False
        """Whether the forward was seen not to change numbers of parameters whose versions it changes, and of all."""

    def learn(self, block: nn.Module) -> None:
        """Look up where `block` holds state, if its modules or the number of its tensors have changed."""
        parts = list(chain.from_iterable(map(dict.values, self._children)))
        if parts == self._parts and sum(map(len, self._tables)) == self._size:
            if sum(map(len, self._may_grow)) != self._grown:
                self._add_new()
            return
        modules = list(block.modules())
        self._children = [module._modules for module in modules]
        self._parts = list(chain.from_iterable(map(dict.values, self._children)))
        self._tables = [table for module in modules for table in (module._parameters, module._buffers)]
        self.hooks = tables_of_hooks(modules[1:])
        self._size, self.looks = sum(map(len, self._tables)), 0
        # A batch norm updates its statistics without a change of their versions, and may be trained later.
        norms = (module for module in modules if isinstance(module, BATCH_NORM_CLASSES))
        self.moving = {(id(norm._buffers), name) for norm in norms for name in norm._buffers}
        self.decides = self.is_proved = self._is_compared = False
        self.written = set()
        self.generators, self._drew = generators_of(modules), []
        self.slots = [(table, name) for table in self._tables for name, held in table.items() if held is not None]
        inside: dict[int, dict[Any, Any]] = {}
        self._may_grow = []
        for module in modules:
            own = vars(module)
            # Engines keep their own counters as attributes of modules with hooks; these are not state.
            looked_at = MODES if is_watched(module) else (*MODES, *own.keys() - OF_EVERY_MODULE)
            self.slots += [(own, name) for name in looked_at if name in own and _is_state(own[name], name)]
            _add_tables(inside, [own[name] for name in looked_at if name in own])
            self._may_grow += () if is_watched(module) else (own, module._buffers)
        self._checked = len(self.slots)
        self.slots += [
            (table, name) for table in inside.values() for name, held in table.items() if _is_state(held, name)
        ]
        self._may_grow += inside.values()
        self._seen = {(id(table), name) for table in self._may_grow for name in table}
        self.has_grown()

    def has_grown(self) -> None:
        """Record what the tables hold after a run: what appears from now on is another code's."""
        self._grown = sum(map(len, self._may_grow))

    def _add_new(self) -> None:
        """Add slots for what the model's code has put on the block, or into a dictionary or object of it."""
        for table in (each for each in self._may_grow if len(each) <= _LARGEST_TABLE):
            new = [name for name in table if (id(table), name) not in self._seen]
            self._seen.update((id(table), name) for name in new)
            new = [name for name in new if _is_state(table[name], name) and not str(name).startswith("_memopt")]
            self.slots = [*self.slots, *((table, name) for name in new)]
            self.moving.update((id(table), name) for name in new)

    def before(self) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
        """Each table in which a forward may create state, with a copy of it."""
        return [(table, dict(table)) for table in self._may_grow]

    def created(self, before: Iterable[tuple[dict[Any, Any], dict[Any, Any]]]) -> list[tuple[Slot, Any]]:
        """The slots that got their first value since :meth:`before`, and what they held: nothing or None."""
        found = [
            ((table, name), was.get(name, ABSENT))
            for table, was in before
            for name, held in list(table.items())
            if held is not None and was.get(name) is None and _may_be_recreated(name, held)
        ]
        if found:
            self._parts = [None]  # the next call looks for its state again
        return found

    def has_run(self, changed: Sequence[Slot], drew: Sequence[Generator]) -> None:
        """Record a run of the forward, the slots whose values it changed, and the generators that it drew from."""
        self.looks += 1
        self.moving.update((id(table), name) for table, name in changed)
        self._drew += [each for each in drew if each not in self._drew]
        if self.looks == _LOOKS:
            self.generators = self._drew
            # What is None may be a tensor in other calls.
            self.slots = [
                (table, name)
                for place, (table, name) in enumerate(self.slots)
                if table.get(name) is None or self.is_read(place, table, name)
            ]
            self._checked = len(self.slots)

    def changes(self, lent: Sequence[tuple[Slot, Any]]) -> None:
        """Record slots that hold other values at the second run than at the first: the model's code may set them."""
        changed = [slot for slot, value in lent if not is_same(slot[0].get(slot[1], ABSENT), value)]
        if new := [(table, name) for table, name in changed if (id(table), name) not in self.moving]:
            self.moving.update((id(table), name) for table, name in new)
            known = {(id(table), name) for table, name in self.slots}
            self.slots = [*self.slots, *((table, name) for table, name in new if (id(table), name) not in known)]

    @contextmanager
    def proving(self, changed: Sequence[Tensor], block: nn.Module) -> Iterator[None]:
        """Raises a RuntimeError if what ran inside, the forward of `block`, has changed numbers of its parameters.

        Args:
            changed: the parameters whose versions the first run changed. The others are compared only once.
        """
        own = () if self.is_proved else changed
        known = own if self._is_compared else list(dict.fromkeys((*block.parameters(), *own)))
        before = Values(known)
        try:
            yield
        finally:  # also where checkpointing stops the run at the last tensor that it needs
            for index in before.changed():
                raise _unseen(block, known[index])
            self.is_proved |= bool(own)
            self._is_compared = True

    def may_write(self, name: str, value: Any) -> bool:
        """Whether the forward changes an argument in place, or may do so in one of the first calls: a mask, no more."""
        is_mask = isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
        return is_mask and (name in self.written or self.looks < _LOOKS)

    def is_read(self, place: int, table: dict[Any, Any], name: Any) -> bool:
        """Whether the value in a slot matters: tensors and modes of modules do, others if they were seen to change."""
        held = name in MODES or isinstance(table.get(name), Tensor)
        return (id(table), name) in self.moving or (held and place < self._checked)


class RunsTwice:
    """One call of a block's forward, which runs now and again in backward."""

    def __init__(
        self,
        state: BlockState,
        block: nn.Module,
        function: Callable[..., Any],
        given: Sequence[Any],
        attention: KeptAttention | None = None,
        by_heads: ByHeads | None = None,
    ) -> None:
        """`attention` keeps its outputs for the second run, and both runs are inside `by_heads`."""
        state.learn(block)
        self._attention, self._by_heads = attention, by_heads or nullcontext()
        self._state, self._block, self._function = state, block, function
        named = getattr(function, "keywords", {})
        # PyTorch's checkpoint passes the tensors in the second run; it may have moved them to other memory.
        self._given = (
            [None if isinstance(value, Tensor) else copied(value) for value in given],
            {name: copied(value) for name, value in named.items() if isinstance(value, CONTAINERS)},
        )
        places = {id(value): at for at, value in reversed([*enumerate(given)]) if isinstance(value, Tensor)}
        self._places = [places.get(id(value), at) for at, value in enumerate([*given, *named.values()])]
        """For each argument, the place of the first one by position that is the same tensor, or its own place."""
        others = [*named.values(), *(value for value in given if not isinstance(value, Tensor))]
        self._contents = Contents(others)
        # PyTorch's checkpoint checks versions only of tensors passed by position; these are the others.
        self._arguments = [*tensors_in(others), *self._contents.tensors]
        self._held: Held | None = None
        self._created: list[tuple[Slot, Any]] = []
        """The slots that the forward created, as in :meth:`BlockState.created`."""
        self._copies: dict[int, Tensor] = {}
        """Index of a slot -> a copy of its tensor from before the forward changed it."""
        self._lost: list[Tensor] = []
        """Tensors that the forward changed without a change of their version, and of which there is no copy."""
        self._own: Sequence[Tensor] | None = None
        """The parameters whose versions the first run changed; None before its end."""

    def __call__(self, *args: Any) -> Any:
        if self._held is None:
            return self._first(*args)
        if versions_of(self._arguments) != self._given_versions:
            for tensor, version in zip(self._arguments, self._given_versions, strict=True):
                check_version(tensor, version, _WHY_GIVEN)
        for tensor in self._lost:
            raise _unseen(self._block, tensor)
        lent = self._held.lent(self._block, _WHY, self._copies, is_read=self._state.is_read)
        self._state.changes(lent)
        lent += _shadows(self._block, lent) if lent else []
        lent += self._changing(lent)
        with self._contents.standing():
            again, named = self._arguments_again(args)
            return self._second(lent, functools.partial(self._function, **named), again)

    def _changing(self, lent: Sequence[tuple[Slot, Any]]) -> list[tuple[Slot, Any]]:
        """The slots that the forward changes, and that hold their value of before it again, without those in `lent`:
        the second run will change them, too."""
        assert self._held is not None
        left = self._state.moving - {(id(table), name) for (table, name), _ in lent}
        values = zip(self._held.slots, self._held.values, strict=True) if left else ()
        return [((table, name), value) for (table, name), value in values if (id(table), name) in left]

    def _second(self, lent: Sequence[tuple[Slot, Any]], function: Callable[..., Any], args: Sequence[Any]) -> Any:
        assert self._held is not None
        decisions, attention = self._decisions, self._attention
        if self._own is None:  # the forward computes gradients: the first run is not over
            for stored in (each for each in (decisions, attention) if each is not None):
                stored.forget()
        with (
            self._state.proving(self._own or (), self._block),
            self._held.trained_as_before(),
            hooks_as_before(self._hooked),
            in_states(self._generators, self._random),
            standing([*lent, *self._created]),
            attending_with(self._kernels),
            self._by_heads,
            nullcontext() if decisions is None else decisions.repeat(),
            nullcontext() if attention is None else attention.repeat(),
            stopping_unseen(),
        ):
            return function(*args)

    def _first(self, *args: Any) -> Any:
        state = self._state
        looks = state.looks < _LOOKS
        may_move = looks or bool(state.moving)
        self._held = held = Held(state.slots, copies=may_move)
        possible = self._possible_copies(held, looks) if may_move else {}
        # The second run shows whether parameters change.
        others = held.state if not state.looks else ()
        with_copies = {id(held.values[i]) for i in possible}
        large = [each for each in others if id(each) not in with_copies]
        large_before = Values(large)
        before = state.before() if looks else []
        self._hooked = [(table, dict(table)) for table in state.hooks]
        self._kernels = kernels_of_attention(with_priority=True)
        self._given_versions = versions_of(self._arguments)
        named = getattr(self._function, "keywords", {})
        masks = {name: value.clone() for name, value in named.items() if state.may_write(name, value)}
        self._generators = state.generators
        self._random = [read() for read, _ in self._generators]
        self._decisions = Decisions(args) if looks or state.decides else None
        values = apart((*args, *named.values()), leaves=True)
        function = functools.partial(self._function, **dict(zip(named, values[len(args) :], strict=True)))
        try:
            with self._by_heads, self._decisions or nullcontext(), self._attention or nullcontext():
                return function(*values[: len(args)])
        finally:
            state.has_grown()
            self._keep_written(masks, named)
            state.decides |= self._decisions is not None and bool(self._decisions.made)
            if looks or held.has_moved:
                moved = held.moved()
                if not state.looks:  # once, since each comparison waits for the device
                    moved += [i for i, was in possible.items() if _has_moved_unseen(was, held.values[i])]
                    seen = {id(held.values[i]) for i in moved}
                    self._lost = [large[i] for i in large_before.changed() if id(large[i]) not in seen]
                state.has_run([held.slots[i] for i in moved], drew_from(self._generators, self._random))
            places = [(id(table), name) for table, name in held.slots]
            self._copies = {i: was for i, was in possible.items() if places[i] in state.moving}
            self._created = state.created(before)
            self._own = held.settle()

    def _arguments_again(self, args: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of the second run, by position and by name; PyTorch's checkpoint passes `args`."""
        given, mine = self._given
        named = {**getattr(self._function, "keywords", {})}
        named |= {name: value.clone() if isinstance(value, Tensor) else copied(value) for name, value in mine.items()}
        values = [value if isinstance(value, Tensor) else copied(own) for value, own in zip(args, given, strict=True)]
        values += named.values()
        values = apart([values[place] for place in self._places])
        return values[: len(given)], dict(zip(named, values[len(given) :], strict=True))

    def _keep_written(self, masks: dict[str, Tensor], named: dict[str, Any]) -> None:
        """Of `masks`, copies of arguments in `named`, keep those whose originals the forward changed in place."""
        before = list(zip(self._arguments, self._given_versions, strict=True))
        changed = {id(each) for each, version in before if versions_of([each]) != [version]} if masks else set()
        if written := {name: mask for name, mask in masks.items() if id(named[name]) in changed}:
            self._state.written |= written.keys()
            self._given[1].update(written)
            changed = {id(named[name]) for name in written}
            self._arguments = [each for each, _ in before if id(each) not in changed]
            self._given_versions = [version for each, version in before if id(each) not in changed]

    def _possible_copies(self, held: Held, looks: bool) -> dict[int, Tensor]:
        """Index of a slot -> a copy of its tensor, where the forward may be about to change the tensor in place."""
        with torch.no_grad():
            return {
                i: value.detach().clone()
                for i, ((table, name), value) in enumerate(zip(held.slots, held.values, strict=True))
                if isinstance(value, Tensor) and (looks or (id(table), name) in self._state.moving)
                if not isinstance(value, nn.Parameter) and not value.requires_grad and value.numel() <= _LARGEST_COPY
            }


def _has_moved_unseen(was: Tensor, now: Tensor) -> bool:
    """Whether the values of a tensor changed without its version: through ``.data``, or by `F.batch_norm`."""
    return type(now) is Tensor and not now.is_meta and not torch.equal(was, now)


def _shadows(block: nn.Module, lent: Sequence[tuple[Slot, Any]]) -> list[tuple[Slot, Any]]:
    """Plain attributes that would hide a parameter or buffer in `lent`: pruning puts one in place of a weight."""
    own = {id(table): vars(module) for module in block.modules() for table in (module._parameters, module._buffers)}
    found = [((own.get(id(table), {}), name), ABSENT) for (table, name), _ in lent]
    return [(slot, value) for slot, value in found if slot[1] in slot[0]]


def _unseen(block: nn.Module, tensor: Tensor) -> RuntimeError:
    """The error for a tensor whose numbers the forward of `block` changes."""
    named = chain(block.named_parameters(), block.named_buffers())
    name = next((name for name, each in named if each is tensor), "a tensor")
    return changed_in_place(f"'{name}' {list(tensor.shape)}", tensor._version, tensor._version, _WHY)


def _is_state(value: Any, name: Any) -> bool:
    if isinstance(value, Tensor):  # tools that compute weights do so for the second run, too
        return not (value.requires_grad and name in WEIGHTS)
    return not isinstance(value, nn.Module)


def _may_be_recreated(name: Any, value: Any) -> bool:
    """Whether the second run may create `value` once more: not what is trained, nor memopt's own attributes."""
    is_trained = isinstance(value, nn.Module) or (isinstance(value, Tensor) and value.requires_grad and value.is_leaf)
    return not is_trained and not (isinstance(name, str) and name.startswith("_memopt"))


def _add_tables(found: dict[int, dict[Any, Any]], values: Iterable[Any], depth: int = _DEPTH) -> None:
    """Add the dictionaries in `values` and the attribute tables of its objects to `found`, by id; recursively."""
    for value in values:
        if isinstance(value, (list, tuple)):
            _add_tables(found, value, depth - 1)
            continue
        table = value if isinstance(value, dict) else attributes_of(value)
        if table is not None and depth and id(table) not in found:
            found[id(table)] = table
            _add_tables(found, table.values(), depth - 1)
