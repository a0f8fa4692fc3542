"""What each of several devices holds: what sharding divides, and the buffers that it adds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memopt.prediction.events import Event, Storage
from memopt.prediction.optimizers import Form
from memopt.prediction.setup import Setup
from memopt.prediction.trace import Trace


@dataclass(frozen=True)
class Share:
    """The part of one device."""

    resident: tuple[Storage, ...]
    events: tuple[Event, ...]
    """Of forward and backward."""
    gradients: tuple[Storage, ...]
    """What of `events` the optimizer's step frees."""
    forms: tuple[Form, ...]
    """What the optimizer steps."""
    notes: tuple[str, ...] = ()

    def accumulating(self) -> Iterator[Event]:
        """`events` of a later micro-batch: a gradient is freed once it is added."""
        added = set(self.gradients)
        for event in self.events:
            yield event
            if event.allocated and event.storage in added:
                yield Event(event.storage, False, event.moment)


def shard(traced: Trace, setup: Setup) -> Share:
    """The share of one of ``setup.devices``."""
    forms = tuple((each.shape, each.dtype) for each in traced.parameters if each.trained)
    resident = tuple(traced.resident())
    notes: tuple[str, ...] = ()
    if setup.sharding == "ddp":
        copies = sum(each.nbytes for each in traced.gradients)
        resident += (Storage(copies, "communication", "", "gradient buckets"),)
        notes = ("DDP: gradients are copied into buckets (gradient_as_bucket_view=False, its default).",)
    return Share(resident, traced.events, traced.gradients, forms, notes)
