"""Find the largest batch and the longest sequence that fit, with few predictions."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np

from memopt.errors import ModelError
from memopt.prediction.headline import Largest
from memopt.prediction.peak import MARGIN, Prediction
from memopt.trace.events import Event, Storage

#: The most rows that a search tries.
MOST_ROWS = 512
#: A sketch answers for sizes within this share of its own size; after so many predictions, the search bisects.
_NEAR, _LOOKS = 0.25, 6
#: The most events of a step with which a sketch simulates the allocator; with more it would take too long.
_MOST_EVENTS = 50_000
#: Parts of a step whose bytes depend on the parameters and not on the size of the batch.
_OF_PARAMETERS = frozenset(
    {"weights", "gradients", "optimizer states", "optimizer transients", "weight copies", "communication", "workspaces"}
)


def fits(predicted: Callable[[], Prediction], memory: int) -> bool:
    """Whether a step fits. A step that cannot be traced does not: PEFT refuses its linears, or is not installed."""
    try:
        return predicted().fits(memory)
    except ModelError:
        return False


class Scaled:
    """A sketch: estimates the bytes of a step of `times` the rows of a predicted step; with `by_length`, of `times` its
    tokens in a row.

    Storages of parameters keep their size, and so do storages that have the same size in one of the `others`. The rest
    grows linearly, tensors of tokens x tokens quadratically. Without `others` the allocator is not simulated.
    """

    def __init__(self, found: Prediction, others: Iterable[Prediction] = (), *, by_length: bool = False) -> None:
        self._found, self._seq = found, found.training.seq if by_length else None
        sizes, others = _sizes(found), list(others)
        self._alike = {each for other in others for each, size in _sizes(other).items() if sizes.get(each) == size}
        self._is_followed = bool(others) and len(found.events) <= _MOST_EVENTS
        changes = np.array([event.change for event in found.events], np.float64)
        power_of = {event.storage: self._power(event.storage) for event in found.events if event.allocated}
        powers = np.array([power_of[event.storage] for event in found.events], np.int8)
        curves = [np.cumsum(np.where(powers == power, changes, 0.0)) for power in range(3)]
        self._curves: list[Any] = [np.concatenate(([0.0], curve)) for curve in curves]
        self._always = found.context / (1 + MARGIN) + sum(each.nbytes for each in found.resident)

    def live(self, times: float) -> float:
        """An estimate from live storages alone."""
        constant, linear, square = self._curves
        return (1 + MARGIN) * (self._always + float((constant + times * (linear + times * square)).max()))

    def needs(self, times: float) -> float:
        """An estimate that includes the allocator's unused bytes."""
        found = self._found
        if not self._is_followed:
            return self.live(times) - self.live(1) + found.needs
        made = {
            each: Storage(round(each.nbytes * times**power), each.part) if (power := self._power(each)) else each
            for each in {event.storage: None for event in found.events}
        }
        events = tuple(Event(made[event.storage], event.allocated, event.moment) for event in found.events)
        return round((1 + MARGIN) * replace(found, events=events).usual) + found.context

    def _power(self, storage: Storage) -> int:
        if storage.part in _OF_PARAMETERS or _kind(storage) in self._alike:
            return 0
        return 2 if self._seq is not None and storage.shape[-2:] == (self._seq, self._seq) else 1


_kind: Callable[[Storage], tuple[str, ...]] = attrgetter("module", "operation", "part", "dtype")


def _sizes(found: Prediction) -> dict[tuple[str, ...], int]:
    """Kind of storages -> bytes of the largest one."""
    most: dict[tuple[str, ...], int] = {}
    for storage, allocated, _ in found.events:
        if allocated and storage.nbytes >= most.get(kind := _kind(storage), 0):
            most[kind] = storage.nbytes
    return most


def largest(
    need: Callable[[int], int], limit: int, *, start: int, most: int, sketched: Callable[[int], Scaled]
) -> Largest:
    """The largest whole number up to `most` whose `need` is at most `limit`.

    Either the prediction for this number fits and the one for the next does not, or both follow from the sketch of a
    second or later prediction, whose number differs from both by less than a quarter.

    Args:
        need: predicts the bytes for a number of rows, or of stretches of tokens; grows with this number.
        limit: bytes of the device.
        start: the first number to predict.
        sketched: the sketch of a number whose `need` is known.
    """
    fits, too_much = 0, most + 1
    number = max(1, min(start, most))
    for looks in itertools.count(1):
        needed = need(number)
        if needed <= limit:
            fits = number
        else:
            too_much = number
        if too_much == fits + 1:
            return Largest(fits, is_all=fits == most)
        estimate = _estimated(range(fits + 1, too_much), limit, sketched(number), number, needed)
        if looks > 1 and max(number - estimate, estimate + 1 - number) < _NEAR * number:
            return Largest(estimate, is_all=estimate == most)
        number = max(estimate, fits + 1) if looks < _LOOKS else (fits + too_much) // 2
    raise AssertionError


def _estimated(numbers: range, limit: int, sketch: Scaled, known: int, needed: int) -> int:
    """The last of `numbers` that fits by the sketch of `known`, which takes `needed` bytes; if none fits, the number
    before the first."""
    numbers = numbers[: bisect_left(numbers, True, key=lambda each: sketch.live(each / known) > limit)]
    # The allocator's unused bytes are nearly the same share of the live bytes at every size.
    share = needed / max(sketch.live(1), 1)
    guess = bisect_left(numbers, True, key=lambda each: share * sketch.live(each / known) > limit)
    return numbers.start + _first(numbers, lambda each: sketch.needs(each / known) > limit, guess) - 1


def _first(numbers: range, is_too_much: Callable[[int], bool], guess: int) -> int:
    """The index of the first number that is too much, with few calls if `guess` is near it."""
    low, high, probe, step = 0, len(numbers), guess, 1
    while low < high:
        if not low <= probe < high:
            probe = high - 1 if probe == high == len(numbers) else (low + high) // 2
        if is_too_much(numbers[probe]):
            high, probe = probe, probe - step
        else:
            low, probe = probe + 1, probe + step
        step *= 2
    return low
