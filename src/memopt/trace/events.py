"""A step as a sequence of allocations and frees, from which charts, the allocator and the peak are computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import torch

from memopt.trace.operations import Operation
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
#: Purposes of storages, in the order in which tables list them.
PARTS: tuple[Part, ...] = get_args(Part)
Moment = Literal["forward", "loss", "backward", "optimizer step"]


@dataclass(frozen=True, eq=False, slots=True)
class Storage:
    """One block of memory; compared by identity, so that an allocation and its free hold the same object."""

    nbytes: int
    part: Part
    module: str = ""
    """The module whose forward or backward allocated it; for a weight, the name of the weight."""
    operation: str = ""
    """The operator that allocated it."""
    dtype: str = ""
    shape: tuple[int, ...] = ()


class Event(NamedTuple):
    """An allocation or a free."""

    storage: Storage
    allocated: bool
    """False: freed."""
    moment: Moment

    @property
    def change(self) -> int:
        """Change of the live bytes."""
        return self.storage.nbytes if self.allocated else -self.storage.nbytes


@dataclass(frozen=True)
class Peak:
    """The moment of a step with the most live bytes."""

    nbytes: int
    moment: Moment
    where: str
    """The module whose forward or backward made the allocation at the peak; empty outside of modules."""
    operation: str
    """The operator that made this allocation."""
    parts: dict[Part, int]
    """Live bytes of each part at the peak, in the order of `PARTS`; all parts are in it."""
    index: int
    """Index of the event that made the peak; -1 if the storages that live throughout are the peak."""
    alive: tuple[Storage, ...]
    """Storages that were allocated during the step and live at the peak, in order of allocation."""


@dataclass(frozen=True)
class Activations:
    """The live storages of one step, without parameters, buffers, inputs and the gradients of parameters."""

    kept: int
    """Bytes that live between forward and backward."""
    peak: Peak
    most: dict[Part, int]
    """For each part, the most bytes that live at one time, at the peak or elsewhere."""


@dataclass(frozen=True)
class Parameter:
    """A weight, adapter or buffer; tied tensors are one entry."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    trained: bool
    is_buffer: bool = False
    is_idle: bool = False
    """Whether it is trained and the step gives no gradient to it, so that an optimizer makes no state for it."""
    embeds: bool = False
    """Whether it is the weight of an `nn.Embedding`, which a head may share."""

    @property
    def is_stepped(self) -> bool:
        """Whether the optimizer steps it."""
        return self.trained and not self.is_idle


@dataclass(frozen=True)
class Trace:
    """One forward and backward without optimizer; the optimizer changes nothing in it, so one trace serves several."""

    training: Training
    parameters: tuple[Parameter, ...]
    batch: int
    """Bytes of the inputs."""
    events: tuple[Event, ...]
    """Allocations and frees in order; the gradients of parameters are not freed."""
    gradients: tuple[Storage, ...]
    """The storages that live at the end of `events`."""
    notes: tuple[str, ...] = ()
    blocks: tuple[str, ...] = field(default=(), repr=False)
    operations: tuple[Operation, ...] = field(default=(), repr=False)
    """Operations in order; their `moment` counts `events`."""
    runs: tuple[Run, ...] = ()
    """Runs of alike blocks whose events are not in `events`; their parameters are in `parameters`."""
    activations: Activations | None = field(default=None, repr=False)
    """None if blocks were left out."""

    def resident(self) -> Iterator[Storage]:
        """Storages that live during the whole step: weights, buffers and the batch."""
        for each in self.parameters:
            dtype = str(each.dtype).removeprefix("torch.")
            yield Storage(each.nbytes, "weights", each.name, "", dtype, each.shape)
        yield Storage(self.batch, "batch")


def peak_of(resident: Iterable[Storage], events: Sequence[Event]) -> Peak:
    """The peak of the step `events`, added to the storages that are `resident` during the whole step."""
    parts: dict[Part, int] = dict.fromkeys(PARTS, 0)
    for storage in resident:
        parts[storage.part] += storage.nbytes
    live = most = sum(parts.values())
    top = -1
    for index, (storage, allocated, _) in enumerate(events):
        live += storage.nbytes if allocated else -storage.nbytes
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
    """The storages that `events` allocate and do not free."""
    found: dict[Storage, None] = {}
    for event in events:
        if event.allocated:
            found[event.storage] = None
        else:
            del found[event.storage]
    return tuple(found)
