"""A step as a sequence of allocations and frees: the input of charts, allocator and peak."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from memopt.trace.operations import Operation
from memopt.trace.timeline import Activations
from memopt.trace.training import Training
from memopt.walk.models.alike import Run

Part = Literal[
    "weights",
    "gradients",
    "optimizer states",
    "optimizer transients",
    "saved tensors",
    "loss",
    "recomputed",
    "activation gradients",
    "temporaries",
    "weight copies",
    "batch",
    "communication",
    "workspaces",
]
#: What a storage is for, in the order in which tables list it.
PARTS: tuple[Part, ...] = get_args(Part)
Moment = Literal["forward", "loss", "backward", "optimizer step"]


@dataclass(frozen=True, eq=False, slots=True)
class Storage:
    """One block of memory; equal to itself only, so an allocation and its free hold the same."""

    nbytes: int
    part: Part
    module: str = ""
    """The module whose forward or backward allocated it; of a weight, its own name."""
    operation: str = ""
    """The operator that allocated it."""
    dtype: str = ""
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Event:
    """An allocation or a free."""

    storage: Storage
    allocated: bool
    """False: freed."""
    moment: Moment

    @property
    def change(self) -> int:
        """Bytes that it adds to the live ones."""
        return self.storage.nbytes if self.allocated else -self.storage.nbytes


@dataclass(frozen=True)
class Peak:
    """The moment of a step with the most live bytes."""

    nbytes: int
    moment: Moment
    where: str
    """The module whose forward or backward allocated then; empty outside of modules."""
    operation: str
    """The operator that did."""
    parts: dict[Part, int]
    """Bytes of each part that live then, in the order of `PARTS`; all parts are in it."""
    index: int
    """Of the event that made the peak; -1 where what lives throughout is the peak."""
    alive: tuple[Storage, ...]
    """What was allocated during the step and lives then, in order of allocation."""


@dataclass(frozen=True)
class Parameter:
    """A weight, adapter or buffer; tied ones are one."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    trained: bool
    is_buffer: bool = False


@dataclass(frozen=True)
class Trace:
    """One forward and backward, with nothing of the optimizer. Independent of it, so one trace serves several."""

    training: Training
    parameters: tuple[Parameter, ...]
    batch: int
    """Bytes of the inputs."""
    events: tuple[Event, ...]
    """Gradients of parameters live on at their end."""
    gradients: tuple[Storage, ...]
    """Those that live at the end."""
    notes: tuple[str, ...] = ()
    blocks: tuple[str, ...] = field(default=(), repr=False)
    operations: tuple[Operation, ...] = field(default=(), repr=False)
    """What was computed and moved; their `moment` counts `events`."""
    runs: tuple[Run, ...] = ()
    """Runs of alike blocks whose events are not in `events`; their parameters are in `parameters`."""
    activations: Activations | None = field(default=None, repr=False)
    """The same step without parameters and their gradients; None where blocks were left out."""

    def resident(self) -> Iterator[Storage]:
        """What lives throughout: weights, buffers and the batch."""
        for each in self.parameters:
            dtype = str(each.dtype).removeprefix("torch.")
            yield Storage(each.nbytes, "weights", each.name, "", dtype, each.shape)
        yield Storage(self.batch, "batch")


def peak_of(resident: Iterable[Storage], events: Sequence[Event]) -> Peak:
    """The peak of the step `events`, beside what is `resident` throughout."""
    parts: dict[Part, int] = dict.fromkeys(PARTS, 0)
    for storage in resident:
        parts[storage.part] += storage.nbytes
    live = most = sum(parts.values())
    top = -1
    for index, event in enumerate(events):
        live += event.change
        if live > most:
            most, top = live, index
    alive = living(events[: top + 1])
    for storage in alive:
        parts[storage.part] += storage.nbytes
    if top < 0:
        return Peak(most, "forward", "", "", parts, top, ())
    last = events[top]
    moment = "loss" if last.storage.part == "loss" else last.moment
    return Peak(most, moment, last.storage.module, last.storage.operation, parts, top, alive)


def living(events: Sequence[Event]) -> tuple[Storage, ...]:
    """What was allocated and not freed."""
    found: dict[Storage, None] = {}
    for event in events:
        if event.allocated:
            found[event.storage] = None
        else:
            del found[event.storage]
    return tuple(found)
