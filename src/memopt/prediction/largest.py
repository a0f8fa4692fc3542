"""The largest batch and the longest sequence that fit, found by few predictions."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from memopt.prediction.headline import Largest
from memopt.prediction.peak import MARGIN, Prediction
from memopt.trace.events import Event, Storage

#: Rows that no search goes beyond.
MOST_ROWS = 512
#: Predictions after which a sketch is not followed where it gains little, and numbers that one is asked for.
_LOOKS, _TRIES = 4, 4
#: Segments of the allocator: what one more adds has to be more than these, or it is not told but predicted.
_SEGMENT = 20 << 20
#: Events of a step after which it is faster to predict another size than to follow the allocator.
_MOST_EVENTS = 50_000
#: Parts of a step whose bytes are those of the parameters, whatever its size.
_OF_PARAMETERS = frozenset(
    {"weights", "gradients", "optimizer states", "optimizer transients", "weight copies", "communication", "workspaces"}
)


class Sketch(Protocol):
    """The need of steps of other sizes, told from one step: of a number of times its size, in bytes."""

    def live(self, times: float) -> float:
        """For live storages alone."""

    def needs(self, times: float) -> float:
        """With what the allocator holds beside them."""


class Scaled:
    """Steps of more or fewer rows than that of a prediction; with `by_length` of longer or shorter ones.

    What belongs to the parameters stays, and what is of one size in the predictions of others. The rest grows with the
    size, tensors of tokens x tokens with its square.
    """

    def __init__(self, found: Prediction, others: Iterable[Prediction] = (), *, by_length: bool = False) -> None:
        self._found, self._seq = found, found.training.seq if by_length else None
        sizes = _sizes(found)
        self._alike = {each for other in others for each, size in _sizes(other).items() if sizes.get(each) == size}
        changes = np.array([event.change for event in found.events], np.float64)
        powers = np.array([self._power(event.storage) for event in found.events], np.int8)
        curves = [np.cumsum(np.where(powers == power, changes, 0.0)) for power in range(3)]
        self._curves: list[Any] = [np.concatenate(([0.0], curve)) for curve in curves]
        self._always = found.context / (1 + MARGIN) + sum(each.nbytes for each in found.resident)

    def live(self, times: float) -> float:
        constant, linear, square = self._curves
        return (1 + MARGIN) * (self._always + float((constant + times * (linear + times * square)).max()))

    def needs(self, times: float) -> float:
        found = self._found
        if len(found.events) > _MOST_EVENTS:
            return self.live(times) - self.live(1) + found.needs
        made = {
            each: Storage(round(each.nbytes * times**power), each.part) if (power := self._power(each)) else each
            for each in {event.storage: None for event in found.events}
        }
        events = tuple(Event(made[event.storage], event.allocated, event.moment) for event in found.events)
        return replace(found, events=events).needs

    def _power(self, storage: Storage) -> int:
        if storage.part in _OF_PARAMETERS or _kind(storage) in self._alike:
            return 0
        return 2 if self._seq is not None and storage.shape[-2:] == (self._seq, self._seq) else 1


def _kind(storage: Storage) -> tuple[str, ...]:
    return storage.module, storage.operation, storage.part, storage.dtype


def _sizes(found: Prediction) -> dict[tuple[str, ...], int]:
    """The most bytes of a storage of each kind."""
    most: dict[tuple[str, ...], int] = {}
    for event in found.events:
        kind = _kind(event.storage)
        most[kind] = max(most.get(kind, 0), event.storage.nbytes)
    return most


def largest(
    need: Callable[[int], int], limit: int, *, start: int, most: int, sketched: Callable[[int], Sketch]
) -> Largest:
    """The largest whole number up to `most` of which `need` is at most `limit`.

    The answer was predicted, and fits. That one more does not was predicted too, or is told from the answer.

    Args:
        need: bytes for a number of rows, or of stretches of tokens; grows with it.
        limit: bytes that there are.
        start: where to begin.
        sketched: what other numbers need, told from one whose `need` is known.
    """
    fits, too_much = 0, most + 1
    number = max(1, min(start, most))
    for looks in itertools.count(1):
        is_enough, sketch = need(number) <= limit, sketched(number)
        if is_enough:
            fits = number
            more = 1 + 1 / number
            growth = sketch.live(more) - sketch.live(1)
            over = sketch.live(more) - limit
            is_told = over > growth / 2 or (looks > 1 and over > -growth and sketch.needs(more) > limit)
            if number < most and growth > _SEGMENT and is_told:
                return Largest(fits)
        else:
            too_much = number
        if too_much == fits + 1:
            return Largest(fits, is_all=fits == most)
        number = _guess(range(fits + 1, too_much), limit, sketch, number, looks)
    raise AssertionError


def _guess(numbers: range, limit: int, sketch: Sketch, known: int, looks: int) -> int:
    """Which of `numbers` to predict next, by the sketch of a `known` one: the last that is thought to fit.

    In the middle of those whose storages alone would fit, where the allocator makes steps of what is needed: where none
    but the first is thought to fit, and after some `looks`. Then always further, too.
    """
    held, follows = 0.0, looks < _LOOKS
    most = number = numbers[0]
    for tries in range(_TRIES if follows else 1):
        place = bisect_left(numbers, True, key=lambda each: sketch.live(each / known) + held > limit)
        number = numbers[max(0, place - 1)]
        most = most if tries else number
        if number == numbers[0] or not follows or (needs := sketch.needs(number / known)) <= limit:
            break
        held = needs - sketch.live(number / known)
    if follows and number > numbers[0]:
        return number
    further = 0 if follows else 2 << (looks - _LOOKS)
    return (numbers[0] + max(most, min(numbers[0] + further, numbers[-1]))) // 2
