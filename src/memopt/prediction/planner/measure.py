"""A few traces of a step -> what every level of every block costs.

One trace has every block at the recipe's own level. In the others, a run of blocks of each kind has one level, the
next run another, the smallest first, as plans have them; the block in the middle of a run tells what its level saves
against the recipe's own, in every block of that kind. Blocks are of one kind if they compute the same in forward and
can have the same levels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from memopt.prediction.planner.blocks import Block, Cut
from memopt.prediction.planner.cost import Card, nanoseconds
from memopt.prediction.planner.levels import Levels
from memopt.prediction.planner.search import BlockModel, Option

#: Blocks in a run, at least; in a shorter one the neighbours' levels would show.
_RUN = 3
Trace = Callable[[Sequence[int]], Cut]
"""The level of each block, and of the head -> a step at these levels."""


@dataclass(frozen=True)
class Measured:
    """What every level of every block costs."""

    own: Cut
    """Every block at level 0."""
    examples: tuple[Mapping[int, tuple[Block, Block]], ...]
    """Of each block, and the head: level beyond 0 -> a block of its kind at level 0, and the same at this level."""

    def model(self, card: Card) -> BlockModel:
        """The step as the search sees it, on a card."""
        behind = sum(block.gradients for block in self.own.blocks)
        blocks = []
        for own, examples in zip(self.own.blocks, self.examples, strict=True):
            behind -= own.gradients
            options = []
            for of_kind, there in ((own, own), *examples.values()):
                forward = own.forward + there.forward - of_kind.forward
                backward = own.backward + there.backward - of_kind.backward + behind
                saved = max(own.saved + there.saved - of_kind.saved, 0)
                time = max(_time(own, card) + _time(there, card) - _time(of_kind, card), 0)
                options.append(Option(saved, self.own.base + max(forward, backward), time))
            blocks.append(tuple(options))
        return BlockModel(tuple(blocks), self.own.floor, nanoseconds(self.own.rest, card))

    def levels(self, places: Sequence[int]) -> tuple[int, ...]:
        """The levels that a combination of the options in :meth:`model` stands for."""
        return tuple((0, *its)[place] for place, its in zip(places, self.examples, strict=True))

    def places(self, levels: Sequence[int]) -> tuple[int, ...]:
        """Where the options with these levels stand in :meth:`model`.

        Raises:
            ValueError: a level was not measured.
        """
        return tuple((0, *its).index(level) for level, its in zip(levels, self.examples, strict=True))


def measure(
    levels: Levels, trace: Trace, ahead: Callable[[Sequence[Sequence[int]]], None] = lambda together: None
) -> Measured:
    """What the levels cost: from two traces where each kind has many blocks, else from one for each level at most.

    Args:
        ahead: called with the levels of all traces that follow the first, which are independent.
    """
    options = levels.options
    own = trace((0,) * len(options))
    kinds: dict[tuple[int, tuple[int, ...], bool], list[int]] = {}
    for place, (block, able) in enumerate(zip(own.blocks, options, strict=True)):
        is_head = place == len(options) - 1
        kinds.setdefault((sum(each.flops for each in block.operations[0]), able, is_head), []).append(place)
    traces: list[list[tuple[int, Sequence[int], Sequence[int]]]] = []
    for (_, able, _), places in kinds.items():
        for number, runs in enumerate(_runs(able[:0:-1], places)):
            traces.extend([] for _ in range(number + 1 - len(traces)))
            traces[number] += [(level, run, places) for level, run in runs]
    examples: list[dict[int, tuple[Block, Block]]] = [{} for _ in options]
    together = [_levels_of(each, len(options)) for each in traces]
    ahead(together)
    for each, chosen in zip(traces, together, strict=True):
        found = trace(chosen)
        for level, run, alike in each:
            for place in alike:
                example = place if len(run) == len(alike) else run[len(run) // 2]
                examples[place][level] = own.blocks[example], found.blocks[example]
    return Measured(own, tuple({level: its[level] for level in sorted(its)} for its in examples))


def _levels_of(runs: list[tuple[int, Sequence[int], Sequence[int]]], count: int) -> list[int]:
    chosen = [0] * count
    for level, run, _ in runs:
        for place in run:
            chosen[place] = level
    return chosen


def _runs(levels: Sequence[int], places: Sequence[int]) -> Iterator[list[tuple[int, Sequence[int]]]]:
    """For each trace, the runs of `places` and the level of each: as few traces as runs of `_RUN` allow."""
    for together in _batched(levels, max(1, len(places) // _RUN)):
        bounds = [len(places) * number // len(together) for number in range(len(together) + 1)]
        yield [(level, places[low:high]) for level, (low, high) in zip(together, pairwise(bounds), strict=True)]


def _time(block: Block, card: Card) -> int:
    return sum(nanoseconds(part, card) for part in block.operations)


def _batched(levels: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (levels[start : start + size] for start in range(0, len(levels), size))
