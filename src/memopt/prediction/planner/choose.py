"""The fastest plan that fits: searched in the block model, confirmed by traces.

The block model knows the live bytes of a step up to what neighbouring levels do to each other; what the allocator
reserves and the CUDA context come on top. So a plan that the search finds is traced, and what the trace says more than
the model moves the limit of the next search.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from memopt.prediction.planner.search import BlockModel, cheapest, smallest

#: Traces that confirm, at most; those of them after one that fits; and the part of the budget, one over this, that no
#: search more is worth.
_MOST, _MORE, _STEP = 8, 2, 500
#: The part of the budget, one over this, by which the model may be too careful about blocks that are all at one level.
_NEAR = 20
TotalOf = Callable[[tuple[int, ...]], int]
"""Options of the blocks -> bytes of the device that the step takes, by a trace."""


def fastest_that_fits(model: BlockModel, budget: int, total_of: TotalOf) -> tuple[int, ...] | None:
    """The options that take the least time of those whose total is `budget` at most; None where none is.

    Args:
        model: what the search goes by.
        budget: bytes.
        total_of: is asked for the first options of all blocks, and then for one combination after another.
    """
    found: dict[tuple[int, ...], int] = {}

    def total(chosen: tuple[int, ...]) -> int:
        if chosen not in found:
            found[chosen] = total_of(chosen)
        return found[chosen]

    # The rest of the step may need more than the blocks do: what is reserved still falls with what they need.
    own, best, floor = (0,) * len(model.blocks), None, model.floor
    limit, ceiling, step, more = budget - total(own) + model.peak(own), sys.maxsize, budget // _STEP, _MORE
    model, is_open = replace(model, floor=0), floor <= limit + budget // 50
    for _ in range(_MOST if is_open else 0):
        chosen = cheapest(model, limit)
        if chosen is None or (best is not None and model.time(chosen) >= model.time(best)):
            break
        over = total(chosen) - budget
        if over <= 0:  # the model may have been too careful, by as much as is free
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
    """Every block at one level, and the head at its smallest: blocks of one level share what the allocator holds."""
    *blocks, head = model.blocks
    of_head = min(range(len(head)), key=lambda place: head[place].need)
    for level in range(1, max(map(len, blocks), default=1)):
        yield *(min(level, len(options) - 1) for options in blocks), of_head


def without(model: BlockModel, allowed: Sequence[Sequence[bool]]) -> BlockModel:
    """`model` with those options alone that are `allowed`; the others never fit."""
    blocks = tuple(
        tuple(option if ok else replace(option, need=sys.maxsize // 4) for option, ok in zip(options, its, strict=True))
        for options, its in zip(model.blocks, allowed, strict=True)
    )
    return replace(model, blocks=blocks)


def between(one: BlockModel, many: BlockModel, part: float) -> BlockModel:
    """The model of a batch between those of two models: `part` of the way from `one` to `many`.

    Bytes and FLOPs are affine in the rows of a batch, up to chunks and rounding.
    """

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
