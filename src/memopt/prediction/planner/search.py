"""The cheapest combination of levels under a limit of memory, and the frontier of memory against time.

Blocks run in order, and their backward in reverse. While block i runs, in either, what the blocks before it have saved
is there, and what the blocks behind it save is not:

    peak = max(floor, max over i of (saved_0 + ... + saved_{i-1} + need_i))

The head and the loss are the last of the blocks. Of all combinations of the first i blocks that fit, only those matter
that no other beats in both bytes saved and time: the limits of the blocks behind them depend on the sum alone. So the
search is exhaustive, in time that grows with the number of different sums (alike blocks have few).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Option:
    """What one level of one block costs."""

    saved: int
    """Bytes that the block leaves for backward."""
    need: int
    """The most bytes that live while it runs, in forward or backward, without what the blocks before it saved."""
    time: int
    """Of its forward and backward, in nanoseconds."""


@dataclass(frozen=True)
class BlockModel:
    """A step as the planner sees it: the options of each block, in the order of the forward."""

    blocks: tuple[tuple[Option, ...], ...]
    floor: int = 0
    """The most bytes that live in the rest of the step, whatever the levels: in the optimizer's step."""
    rest: int = 0
    """Nanoseconds of what is in no block."""

    def peak(self, chosen: Sequence[int]) -> int:
        """The peak of the step, in bytes, where block i has its option ``chosen[i]``."""
        peak, saved = self.floor, 0
        for options, place in zip(self.blocks, chosen, strict=True):
            peak = max(peak, saved + options[place].need)
            saved += options[place].saved
        return peak

    def time(self, chosen: Sequence[int]) -> int:
        """The nanoseconds of the step."""
        return self.rest + sum(options[place].time for options, place in zip(self.blocks, chosen, strict=True))

    @property
    def fastest(self) -> tuple[int, ...]:
        """The combination that takes the least time, whatever it needs."""
        return tuple(min(range(len(each)), key=lambda place: each[place].time) for each in self.blocks)


def cheapest(model: BlockModel, limit: int) -> tuple[int, ...] | None:
    """The options whose sum of time is the least of all that peak at `limit` bytes at most; None where none does.

    Of equal ones, those that save the least in the first blocks: backward reaches these last.
    """
    if model.floor > limit:
        return None
    saved, time, order = (np.zeros(1, np.int64) for _ in range(3))
    steps: list[tuple[np.ndarray, np.ndarray]] = []
    for options in model.blocks:
        before, place = (each.ravel() for each in np.indices((len(saved), len(options))))
        table = np.array([(o.saved, o.need, o.time) for o in options], np.int64)
        fits = saved[before] + table[place, 1] <= limit
        before, place = before[fits], place[fits]
        if not len(before):
            return None
        saved_now, time_now = saved[before] + table[place, 0], time[before] + table[place, 2]
        # Bytes first, then time; of equal ones the one whose beginning saved less.
        found = np.lexsort((order[before] + saved_now, time_now, saved_now))
        lowest = np.minimum.accumulate(time_now[found])
        best = found[np.concatenate(([True], lowest[1:] < lowest[:-1]))]
        steps.append((before[best], place[best]))
        saved, time, order = saved_now[best], time_now[best], (order[before] + saved_now)[best]
    last = int(np.argmin(time))
    chosen = []
    for before, place in reversed(steps):
        chosen.append(int(place[last]))
        last = int(before[last])
    return tuple(reversed(chosen))


def smallest(model: BlockModel) -> int:
    """The lowest peak, in bytes, that any combination reaches."""
    low, high = model.floor, model.peak(model.fastest)
    while low < high:
        middle = (low + high) // 2
        if cheapest(model, middle) is None:
            low = middle + 1
        else:
            high = middle
    return low


def frontier(model: BlockModel, points: int = 40) -> Iterator[tuple[int, ...]]:
    """Combinations that no other beats in both memory and time, from the fastest to the smallest; about `points`."""
    low, limit = smallest(model), model.peak(model.fastest)
    step = max(1, (limit - low) // points)
    before: tuple[int, ...] | None = None
    while (chosen := cheapest(model, limit)) is not None:
        if before is not None and model.time(chosen) > model.time(before):
            yield before
        before, peak = chosen, model.peak(chosen)
        limit = min(peak - 1, max(limit - step, low))
    if before is not None:
        yield before
