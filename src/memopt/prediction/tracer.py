"""Steps of one model, patched in one way, at any size: of a deep model only as many blocks are traced as it takes."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby

from memopt.errors import ModelError
from memopt.forks import each, processes
from memopt.prediction.depth import UnlikeError, put_back
from memopt.prediction.trace import Trace, living, trace
from memopt.reporting.step import Step
from memopt.reporting.training import Training
from memopt.walk.models.alike import LEAST_GROUPS


@dataclass(eq=False)
class Tracer:
    """Traces the step `of` at any size.

    That blocks may be left out is shown once for each way to patch and train: what four groups of alike blocks extend
    to with a fifth has to be, event by event, the trace of five.
    """

    of: Step
    extends: bool | None = None
    """Whether blocks may be left out; None where that is not known yet."""
    traces: dict[Training, Trace] = field(default_factory=dict, init=False)
    """Those that are known."""
    _parts: dict[tuple[Training, int], Trace] = field(default_factory=dict, init=False)
    """Traces of so many groups of alike blocks, ahead of their use."""

    def at(self, training: Training) -> Trace:
        """The step of the whole model.

        Raises:
            ModelError: it cannot be traced.
        """
        if training not in self.traces:
            self.traces[training] = self._extended(training) or self._trace(training)
        return self.traces[training]

    def _trace(self, training: Training, groups: int | None = None) -> Trace:
        if groups is not None and (training, groups) in self._parts:
            return self._parts.pop((training, groups))
        return trace(replace(self.of, training=training), groups=groups)

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
    """Trace at the same time, where forks are allowed, what `first.at(training)` needs and then `others`."""
    if processes() < 2 or len(first.of.sites.blocks) <= LEAST_GROUPS + 1 or first.extends is not None:
        return
    wanted = [(first, training, LEAST_GROUPS + 1), (first, training, LEAST_GROUPS)]
    wanted += [(tracer, its, LEAST_GROUPS) for tracer, its in others]

    def attempt(tracer: Tracer, its: Training, groups: int) -> Trace | None:
        try:
            return tracer._trace(its, groups)
        except ModelError:
            return None  # whoever needs it finds out

    for (tracer, its, groups), found in zip(wanted, each([partial(attempt, *one) for one in wanted]), strict=True):
        if found is not None:
            tracer._parts[its, groups] = found


def _deepened(shallow: Trace, groups: int | None = None) -> Trace:
    """The trace with all blocks that were left out, or with `groups` groups of each run."""
    events, operations = shallow.events, shallow.operations
    for run in shallow.runs:
        count = None if groups is None else min(groups * run.group, run.left_out)
        events, operations = put_back(events, operations, run, count)
    return replace(shallow, events=events, operations=operations, gradients=living(events), runs=())


def _form(traced: Trace) -> list[Hashable]:
    """The events and sums of the operations of a trace, to compare with those of another.

    The order of frees between two allocations changes neither a peak nor what the allocator holds after them, and is
    sometimes Python's collector's; storages without bytes are left out for the same reason.
    """
    totals = (sum(each.flops for each in traced.operations), sum(each.nbytes for each in traced.operations))
    events = [event for event in traced.events if event.storage.nbytes]
    numbers = {event.storage: number for number, event in enumerate(event for event in events if event.allocated)}
    form: list[Hashable] = [totals]
    for allocated, stretch in groupby(events, key=lambda event: event.allocated):
        if not allocated:
            stretch = iter(sorted(stretch, key=lambda event: numbers[event.storage]))
        form += (
            (
                allocated,
                numbers[event.storage],
                event.moment,
                *(getattr(event.storage, name) for name in ("nbytes", "part", "module", "operation", "dtype", "shape")),
            )
            for event in stretch
        )
    return form
