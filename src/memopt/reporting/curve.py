"""The live bytes of a step over its events, thinned to what a chart can show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from memopt.reporting.timeline import KINDS, Step

#: Moments of a curve: two in each column of a chart that is a few hundred columns wide.
MOMENTS = 600


@dataclass(frozen=True)
class Change:
    """Bytes that are allocated (positive) or freed (negative) by one event."""

    moment: int
    nbytes: int
    kind: str
    module: str


@dataclass(frozen=True)
class Curve:
    """Live bytes at some moments of a step, the peak among them; each value holds until the next moment."""

    kinds: Mapping[str, str]
    """Each kind of storage and its name, in stacking order."""
    events: int
    phases: tuple[tuple[str, int], ...]
    """(name, first event) of each phase of the step."""
    moments: tuple[int, ...]
    """Numbers of events, ascending."""
    live: Mapping[str, tuple[int, ...]]
    """Bytes of each kind after each of these events."""
    modules: tuple[str, ...]
    """The module that allocated what the event allocates or frees."""
    top: int
    """Place of the peak in `moments`."""

    @property
    def peak(self) -> int:
        """Bytes that live at the peak."""
        return sum(values[self.top] for values in self.live.values())


def curve(
    changes: Sequence[Change],
    kinds: Mapping[str, str],
    phases: Sequence[tuple[str, int]],
    events: int,
    limit: int = MOMENTS,
    resident: Mapping[str, int] | None = None,
) -> Curve:
    """The curve of `changes`, which are in order, beside the bytes of each kind that are `resident` throughout.

    Of each of limit/2 spans of events, the moments with the most and with the fewest live bytes are shown, so neither
    the peak nor a spike is lost.
    """
    totals = list(accumulate(change.nbytes for change in changes))
    span = -(-2 * len(changes) // limit) or 1
    shown: set[int] = {0} if changes else set()
    for start in range(0, len(changes), span):
        places = range(start, min(start + span, len(changes)))
        shown |= {max(places, key=totals.__getitem__), min(places, key=totals.__getitem__)}
    top = max(range(len(totals)), key=totals.__getitem__, default=0)
    chosen, now = sorted(shown), {**dict.fromkeys(kinds, 0), **(resident or {})}
    rows: list[tuple[int, ...]] = []
    for place, change in enumerate(changes):
        now[change.kind] += change.nbytes
        if place in shown:
            rows.append(tuple(now.values()))
    return Curve(
        kinds=dict(kinds),
        events=events,
        phases=tuple(phases),
        moments=tuple(changes[place].moment for place in chosen),
        live=dict(zip(kinds, zip(*rows, strict=True), strict=True)) if rows else {},
        modules=tuple(changes[place].module for place in chosen),
        top=chosen.index(top) if chosen else 0,
    )


def step_curve(step: Step, limit: int = MOMENTS) -> Curve:
    """The curve of a traced step."""
    changes = [Change(life.born, life.nbytes, kind, life.module) for life, kind in step.lives]
    ended = ((life, kind) for life, kind in step.lives if 0 <= life.died < step.events)
    changes += [Change(life.died, -life.nbytes, kind, life.module) for life, kind in ended]
    changes.sort(key=lambda change: change.moment)
    phases = (("forward", 0), ("backward", step.forward_ends))
    return curve(changes, {str(kind): name for kind, name in KINDS.items()}, phases, step.events, limit)
