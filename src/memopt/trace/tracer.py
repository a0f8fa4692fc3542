"""Trace the step of one model, patched in one way, at any size; of a deep model only a few blocks are traced.

Alike blocks in the interior of a model allocate and free alike. Of a run of alike blocks (or of alike groups, where
kinds of blocks alternate) four groups are traced: one at each end and two between. If the two inner groups allocate and
free alike, event by event, the left-out blocks get copies of their events under other module names. A storage that is
freed outside of its block must be freed in the same place relative to its block, or in one place for all blocks. In any
other case the whole model is traced.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Literal

from memopt.environment.forks import each, processes
from memopt.errors import ModelError
from memopt.trace.events import Event, Storage, Trace, living
from memopt.trace.operations import Operation
from memopt.trace.trace import Subject, subject, trace
from memopt.trace.training import Step, Training
from memopt.walk.models.alike import LEAST_GROUPS, Run, places


@dataclass(eq=False)
class Tracer:
    """Traces the step `of` at any size.

    The first trace checks whether blocks may be left out: the trace of four groups of alike blocks, extended by a fifth
    group, must equal the trace of five groups, event by event. Later sizes rely on that check.
    """

    of: Step
    extends: bool | None = None
    """Whether blocks may be left out; None before the check."""
    traces: dict[Training, Trace] = field(default_factory=dict, init=False)
    """Finished traces of the whole model."""
    _parts: dict[tuple[Training, int], Trace] = field(default_factory=dict, init=False)
    """(training, number of groups of alike blocks) -> a trace made ahead of its use."""
    _subjects: dict[tuple[Training, int | None], Subject] = field(default_factory=dict, init=False)
    """(training without a size, number of groups) -> the model, which is traced at every size."""

    def at(self, training: Training) -> Trace:
        """The trace of the whole model in the step of `training`. Raises a ModelError if the step cannot be traced."""
        if training not in self.traces:
            self.traces[training] = self._extended(training) or self._trace(training)
        return self.traces[training]

    def _trace(self, training: Training, groups: int | None = None) -> Trace:
        if groups is not None and (training, groups) in self._parts:
            return self._parts.pop((training, groups))
        of, key = replace(self.of, training=training), (replace(training, batch=0, seq=None), groups)
        if key not in self._subjects:
            self._subjects[key] = subject(of, groups)
        return trace(of, copy.deepcopy(self._subjects[key]))

    def _extended(self, training: Training) -> Trace | None:
        if self.extends is False:
            return None
        try:
            if self.extends:
                return _deepened(self._trace(training, LEAST_GROUPS))
            deeper = self._trace(training, LEAST_GROUPS + 1)
            if not deeper.runs:
                return deeper
            shallow = self._trace(training, LEAST_GROUPS)
            self.extends = _form(_deepened(shallow, 1)) == _form(deeper)
            return _deepened(shallow) if self.extends else None
        except (UnlikeError, ModelError):
            self.extends = False
            return None


def trace_ahead(first: Tracer, training: Training, *others: tuple[Tracer, Training]) -> None:
    """Where forks are allowed, make the traces for `first.at(training)` and then for `others` in parallel processes."""
    if processes() < 2 or len(first.of.sites.blocks) <= LEAST_GROUPS + 1 or first.extends is not None:
        return
    wanted = [(first, training, LEAST_GROUPS + 1), (first, training, LEAST_GROUPS)]
    wanted += [(tracer, its, LEAST_GROUPS) for tracer, its in others]

    def attempt(tracer: Tracer, its: Training, groups: int) -> Trace | None:
        try:
            return tracer._trace(its, groups)
        except ModelError:
            return None  # the error is raised where the trace is needed

    for (tracer, its, groups), found in zip(wanted, each([partial(attempt, *one) for one in wanted]), strict=True):
        if found is not None:
            tracer._parts[its, groups] = found


def _deepened(shallow: Trace, groups: int | None = None) -> Trace:
    """`shallow` with all left-out blocks put back, or with `groups` groups of each run put back."""
    events, operations = shallow.events, shallow.operations
    for run in shallow.runs:
        count = run.left_out if groups is None else min(groups * run.group, run.left_out)
        events, operations = Extension(events, operations, run, count).whole()
    return replace(shallow, events=events, operations=operations, gradients=living(events), runs=())


def _form(traced: Trace) -> list[Hashable]:
    """A form of a trace to compare with another trace: its events, and the total FLOPs and bytes of its operations.
    Storages of 0 bytes are left out, because Python's garbage collector may free them at any time."""
    totals = (sum(each.flops for each in traced.operations), sum(each.nbytes for each in traced.operations))
    events = _in_order([event for event in traced.events if event.storage.nbytes])
    numbers = {event.storage: number for number, event in enumerate(event for event in events if event.allocated)}
    form_of = attrgetter("nbytes", "part", "module", "operation", "dtype", "shape")
    return [totals, *((each.allocated, numbers[each.storage], each.moment, *form_of(each.storage)) for each in events)]


def _in_order(events: Sequence[Event]) -> list[Event]:
    """The events, with the frees between two allocations sorted by the time when their storages were allocated.

    The order of such frees changes neither a peak nor the allocator's state after them, and it may be arbitrary:
    autocast frees its cache of weights in order of address.
    """
    numbers = {event.storage: number for number, event in enumerate(events) if event.allocated}
    found: list[Event] = []
    for _, stretch in groupby(events, key=lambda event: (event.allocated, event.moment)):
        found += sorted(stretch, key=lambda event: numbers[event.storage])  # allocations are in order
    return found


#: (forward or backward, index of a block in its list); the index is -1 before the first block.
_Segment = tuple[Literal["F", "B"], int]
#: A segment, and the number of a storage among the storages that the segment allocates.
_Address = tuple[Literal["F", "B"], int, int]


class UnlikeError(Exception):
    """Blocks that look alike do not allocate and free alike."""


class Extension:
    """Puts `count` left-out blocks of a run back. Indices count traced blocks alone; `_full` converts to all blocks."""

    def __init__(self, events: Sequence[Event], operations: Sequence[Operation], run: Run, count: int) -> None:
        events = _in_order(events)
        self._given, self._run, self._group, self._count, self._cut = events, run, run.group, count, run.start
        self._names = run.names[: run.start + count] + run.names[run.start + run.left_out :]
        self._traced = run.names[: run.start] + run.names[run.start + run.left_out :]
        self._place = places(self._traced)
        self._segments = list(self._segmented())
        self._address: dict[Storage, _Address] = {}
        self._storage: dict[_Address, Storage] = {}
        self._freed_in: dict[Storage, _Segment] = {}
        self._by_segment: dict[_Segment, list[int]] = defaultdict(list)
        self._operations: dict[int, list[Operation]] = defaultdict(list)
        for operation in operations:
            self._operations[operation.moment].append(operation)
        made: dict[_Segment, int] = defaultdict(int)
        for moment, (event, segment) in enumerate(zip(events, self._segments, strict=True)):
            self._by_segment[segment].append(moment)
            if event.allocated:
                phase, place = segment
                self._address[event.storage] = phase, place, made[segment]
                self._storage[phase, self._full(place), made[segment]] = event.storage
                made[segment] += 1
            else:
                self._freed_in[event.storage] = segment

    def whole(self) -> tuple[tuple[Event, ...], tuple[Operation, ...]]:
        """Events and operations of the step with these blocks. Raises an UnlikeError if the interior blocks that were
        traced do not allocate and free alike."""
        self._check()
        events: list[Event] = []
        operations: list[Operation] = []
        previous: _Segment | None = None
        for moment, (event, segment) in enumerate(zip(self._given, self._segments, strict=True)):
            if segment != previous and segment in (("F", self._cut), ("B", self._cut - 1)):
                left_out = range(self._cut, self._cut + self._count)
                for place in left_out if segment[0] == "F" else reversed(left_out):
                    for like, copied in self._copied(segment[0], place):
                        if like in self._operations:
                            operations += [each.at(len(events)) for each in self._operations[like]]
                        events.append(copied)
            previous = segment
            if moment in self._operations:
                operations += [each.at(len(events)) for each in self._operations[moment]]
            if event.allocated:
                events.append(event)
            else:
                events += self._frees(moment, segment)
        operations.extend(each.at(len(events)) for each in self._operations.get(len(self._given), ()))
        _check_balance(events)
        return tuple(events), tuple(operations)

    def _segmented(self) -> Iterator[_Segment]:
        """The segment of every event; a block's segment begins with its first allocation in forward, or in backward."""
        segment: _Segment = ("F", -1)
        seen = {segment}
        for event in self._given:
            if segment[0] == "F" and event.moment == "backward":
                segment = ("B", -1)
            if event.allocated:
                place = self._place(event.storage.module)
                now: _Segment = (segment[0], place)
                if place >= 0 and now not in seen:
                    segment = now
                    seen.add(now)
            yield segment

    def _full(self, place: int) -> int:
        return place if place < self._cut else place + self._count

    def _check(self) -> None:
        """Raise UnlikeError unless both interior groups have alike events and frees in alike places."""
        for place in range(self._cut - self._group, self._cut):
            for phase in ("F", "B"):
                if self._tokens((phase, place)) != self._tokens((phase, place - self._group)):
                    raise UnlikeError(f"{self._traced[place]} and {self._traced[place - self._group]} are not alike")
        for storage, (phase, place, number) in self._address.items():
            if self._cut - self._group <= place < self._cut:
                twin = self._storage[phase, place - self._group, number]
                if self._is_relative(storage, twin) is None:
                    raise UnlikeError(f"what {self._traced[place]} allocates is not freed as in the block before it")

    def _is_relative(self, storage: Storage, twin: Storage) -> bool | None:
        """True if both are freed in the same place relative to their blocks, False if in one place, None otherwise."""
        mine, other = self._freed_in.get(storage), self._freed_in.get(twin)
        if mine == other:
            return False
        if mine is None or other is None or (mine[0], mine[1] - self._group) != other or other[1] < 0:
            return None
        return True

    def _tokens(self, segment: _Segment) -> list[Hashable]:
        tokens: list[Hashable] = []
        for moment in self._by_segment[segment]:
            event = self._given[moment]
            each = event.storage
            if event.allocated:
                module = self._place(each.module)
                rest = each.module.partition(self._traced[module])[2] if module >= 0 else each.module
                near = module - segment[1] if module >= 0 else None
                tokens.append((near, rest, each.nbytes, each.part, each.operation, each.dtype, each.shape))
            else:
                tokens.append(self._reference(each, segment[1]))
        return tokens

    def _reference(self, storage: Storage, place: int) -> Hashable:
        """A freed storage, described by its block and its form, without its number, module and operation. Blocks at the
        ends may number their storages differently, and a sum over blocks is allocated by another operation in the block
        where it begins."""
        phase, other, _ = self._address[storage]
        near = other if other < 0 else ("near", other - place)
        return phase, near, storage.nbytes, storage.part, storage.dtype, storage.shape

    def _copied(self, phase: Literal["F", "B"], place: int) -> Iterator[tuple[int, Event]]:
        """The events of the left-out block `place`, each with the index of the traced event that it copies."""
        like = self._run.like(place)
        number = 0
        for moment, before in zip(
            self._by_segment[phase, like], self._by_segment[phase, like - self._group], strict=True
        ):
            event = self._given[moment]
            if event.allocated:
                storage = self._renamed(event.storage, place - like)
                self._storage[phase, place, number] = storage
                number += 1
            else:
                other_phase, other, its_number = self._address[event.storage]
                target = other if other < 0 else other + place - like
                if other >= self._cut and target < self._cut + self._count:  # numbered as in interior blocks
                    its_number = self._address[self._given[before].storage][2]
                storage = self._at((other_phase, target, its_number))
            yield moment, Event(storage, event.allocated, event.moment)

    def _renamed(self, storage: Storage, by: int) -> Storage:
        place, module = self._place(storage.module), storage.module
        if place >= 0:
            module = module.replace(self._traced[place], self._names[place + by], 1)
        return Storage(storage.nbytes, storage.part, module, storage.operation, storage.dtype, storage.shape)

    def _frees(self, moment: int, segment: _Segment) -> Iterator[Event]:
        """Events in place of the free of a traced storage: across the cut, storages of blocks put back are freed."""
        event = self._given[moment]
        phase, place, number = self._address[event.storage]
        storage, others = event.storage, range(0)
        if self._cut - self._group <= place < self._cut:
            if not self._is_relative(storage, self._storage[phase, place - self._group, number]):
                others = range(place + self._group, self._cut + self._count, self._group)
            elif segment[1] >= self._cut:
                storage = self._at((phase, place + self._count, number))
        elif self._cut <= place < self._cut + self._group and 0 <= segment[1] < self._cut:
            if segment[1] >= self._cut - self._group:  # the block behind the cut may number differently
                at = self._by_segment[segment].index(moment)
                like = self._by_segment[segment[0], segment[1] - self._group][at]
                number = self._address[self._given[like].storage][2]
            twin = self._storage.get((phase, place - self._group, number))
            if twin is not None and self._is_relative(storage, twin):
                storage = self._at((phase, place, number))
        yield event if storage is event.storage else Event(storage, False, event.moment)
        for other in others:
            yield Event(self._at((phase, other, number)), False, event.moment)

    def _at(self, address: _Address) -> Storage:
        storage = self._storage.get(address)
        if storage is None:
            raise UnlikeError("a block frees what no block before it allocates")
        return storage


def _check_balance(events: Sequence[Event]) -> None:
    alive: set[Storage] = set()
    for event in events:
        if event.allocated == (event.storage in alive):
            raise UnlikeError("a storage would be allocated or freed twice")
        (alive.add if event.allocated else alive.remove)(event.storage)
