"""The fastest combination of levels that fits, and the frontier of memory against time.

Blocks run in order, and their backward in reverse. While block i runs, in either, the tensors that the blocks before it
saved are alive, and those of the blocks behind it are not:

    peak = max(floor, max over i of (saved_0 + ... + saved_{i-1} + need_i))

The head and the loss are the last of the blocks. Of all combinations of the first i blocks that fit, the search keeps
only those that no other combination beats in both saved bytes and time: whether later blocks fit depends on the sum of
the saved bytes alone. So the search is exhaustive; its time grows with the number of different sums.

The block model gives the live bytes of a step, without effects of neighbouring levels on each other, without the
allocator's unused bytes and the CUDA context. So each plan that the search finds is traced, and the difference between
trace and model moves the limit of the next search.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Option:
    """The cost of one level of one block."""

    saved: int
    """Bytes that the block saves for backward."""
    need: int
    """The most live bytes while it runs, in forward or backward, without the tensors that earlier blocks saved."""
    time: int
    """Nanoseconds of its forward and backward."""


@dataclass(frozen=True)
class BlockModel:
    """The planner's model of a step: the options of each block, in the order of the forward."""

    blocks: tuple[tuple[Option, ...], ...]
    floor: int = 0
    """The most live bytes outside the blocks, e.g. in the optimizer's step; the same for all levels."""
    rest: int = 0
    """Nanoseconds of the operations outside the blocks."""

    def peak(self, chosen: Sequence[int]) -> int:
        """The peak of the step, in bytes, if block i takes its option ``chosen[i]``."""
        peak, saved = self.floor, 0
        for options, place in zip(self.blocks, chosen, strict=True):
            peak = max(peak, saved + options[place].need)
            saved += options[place].saved
        return peak

    def time(self, chosen: Sequence[int]) -> int:
        """Nanoseconds of the step, if block i takes its option ``chosen[i]``."""
        return self.rest + sum(options[place].time for options, place in zip(self.blocks, chosen, strict=True))

    @property
    def fastest(self) -> tuple[int, ...]:
        """The combination with the least time, whatever its memory."""
        return tuple(min(range(len(each)), key=lambda place: each[place].time) for each in self.blocks)


def cheapest(model: BlockModel, limit: int) -> tuple[int, ...] | None:
    """The fastest options whose peak is at most `limit` bytes; None if no options fit.

    Among equally fast options the first ones, if these fit (they need no copies to CPU memory); else those that save
    the least in the first blocks, which backward frees last.
    """
    if model.floor > limit:
        return None
    if model.peak(model.fastest) <= limit:
        return model.fastest
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
        # Sort by bytes, then by time; among equals, the one that saved less in its first blocks comes first.
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


#: The most traces that check plans; the most of them after a plan that fits; budget / _STEP is the smallest change of
#: the limit that is worth another search.
_MOST, _MORE, _STEP = 8, 2, 500
#: The model may overestimate blocks that are all at one level by up to budget / _NEAR.
_NEAR = 20
TotalOf = Callable[[tuple[int, ...]], int]
"""Options of the blocks -> bytes of the device that the step takes, by a trace."""


def fastest_that_fits(model: BlockModel, budget: int, total_of: TotalOf) -> tuple[int, ...] | None:
    """The fastest options whose total is at most `budget` bytes, found with the block `model`; None if no options fit.
    `total_of` is called with the first options of all blocks, and then with one combination after another."""
    found: dict[tuple[int, ...], int] = {}

    def total(chosen: tuple[int, ...]) -> int:
        if chosen not in found:
            found[chosen] = total_of(chosen)
        return found[chosen]

    # Search without the floor: even if the floor exceeds the blocks' peak, reserved bytes fall with the blocks' need.
    own, best, floor = (0,) * len(model.blocks), None, model.floor
    # Reserved bytes beyond the live bytes grow with the live bytes.
    beside = int((total(own) - model.peak(own)) * min(1.0, budget / max(total(own), 1)))
    limit, ceiling, step, more = budget - beside, sys.maxsize, budget // _STEP, _MORE
    model, is_open = replace(model, floor=0), floor <= limit + budget // 50
    for _ in range(_MOST if is_open else 0):
        chosen = cheapest(model, limit)
        if chosen is None or (best is not None and model.time(chosen) >= model.time(best)):
            break
        over = total(chosen) - budget
        if over <= 0:  # the model may have overestimated, by as much as is free
            best, before = chosen, limit
            limit, more = min(model.peak(chosen) - over, (limit + ceiling) // 2), more - 1
            if limit - before < budget // _STEP or more < 0:
                break
        elif best is None:
            ceiling, step = model.peak(chosen), 2 * step
            limit = ceiling - max(over, step)
        else:
            ceiling, more = model.peak(chosen), more - 1
            limit = (before + ceiling) // 2
            if more < 0:
                break
    if best is None:
        least = cheapest(model, smallest(model))
        assert least is not None
        near = (each for each in _uniform(model) if model.peak(each) <= limit + budget // _NEAR)
        best = next((each for each in (least, *sorted(near, key=model.time)) if total(each) <= budget), None)
    return best


def _uniform(model: BlockModel) -> Iterator[tuple[int, ...]]:
    """All blocks at one level, the head at its smallest: blocks of one level reuse the allocator's segments best."""
    *blocks, head = model.blocks
    of_head = min(range(len(head)), key=lambda place: head[place].need)
    for level in range(1, max(map(len, blocks), default=1)):
        yield *(min(level, len(options) - 1) for options in blocks), of_head


def without(model: BlockModel, allowed: Sequence[Sequence[bool]]) -> BlockModel:
    """`model` in which only the `allowed` options can fit."""
    blocks = tuple(
        tuple(option if ok else replace(option, need=sys.maxsize // 4) for option, ok in zip(options, its, strict=True))
        for options, its in zip(model.blocks, allowed, strict=True)
    )
    return replace(model, blocks=blocks)


def between(one: BlockModel, many: BlockModel, part: float) -> BlockModel:
    """The block model of a batch size between two others: `part` of the way from `one` to `many`. Bytes and FLOPs are
    affine in the rows of a batch, up to chunks and rounding."""

    def at(low: int, high: int) -> int:
        return round(low + part * (high - low))

    blocks = tuple(
        tuple(
            replace(a, saved=at(a.saved, b.saved), need=at(a.need, b.need), time=at(a.time, b.time))
            for a, b in zip(its, theirs, strict=True)
        )
        for its, theirs in zip(one.blocks, many.blocks, strict=True)
    )
    return BlockModel(blocks, at(one.floor, many.floor), at(one.rest, many.rest))
