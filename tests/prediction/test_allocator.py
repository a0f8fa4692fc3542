"""The simulated CUDA caching allocator: its rounding, its segments, and what fragments."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

import pytest

from memopt.prediction.allocator import least_limit, reserved
from memopt.trace.events import Event, Storage

KIB, MIB = 1 << 10, 1 << 20


def storage(nbytes: int) -> Storage:
    return Storage(nbytes, "temporaries")


def events(*sequence: tuple[Storage, bool]) -> Sequence[Event]:
    return [Event(each, allocated, "forward") for each, allocated in sequence]


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [(1, 2 * MIB), (MIB, 2 * MIB), (MIB + 1, 20 * MIB), (10 * MIB - 512, 20 * MIB), (10 * MIB, 10 * MIB),
     (11 * MIB + 1, 12 * MIB)],
)  # fmt: skip
def test_a_request_gets_a_segment_of_its_size_class(nbytes: int, expected: int) -> None:
    assert reserved([storage(nbytes)], []) == expected


@pytest.mark.parametrize(("count", "expected"), [(4096, 2 * MIB), (4097, 4 * MIB)])
def test_small_requests_are_rounded_to_512_bytes_and_share_segments(count: int, expected: int) -> None:
    assert reserved([storage(1) for _ in range(count)], []) == expected


def test_what_was_freed_is_used_again_and_free_neighbours_are_joined() -> None:
    parts = [storage(5 * MIB) for _ in range(4)]  # one segment
    whole = storage(20 * MIB)
    order = [(each, True) for each in parts] + [(parts[index], False) for index in (0, 2, 1, 3)]
    assert reserved([], events(*order, (whole, True), (whole, False))) == 20 * MIB


def test_the_smallest_free_block_that_fits_is_taken() -> None:
    small, large, next_small, next_large = storage(12 * MIB), storage(40 * MIB), storage(12 * MIB), storage(40 * MIB)
    order = [(large, True), (small, True), (large, False), (small, False)]
    order += [(next_small, True), (next_large, True), (next_small, False), (next_large, False)]
    assert reserved([], events(*order)) == 52 * MIB


@pytest.mark.parametrize(("expandable", "expected"), [(False, 62 * MIB), (True, 40 * MIB)])
def test_a_hole_that_is_too_small_fragments_unless_segments_expand(expandable: bool, expected: int) -> None:
    """What grows by a little never fits the segment of what was freed."""
    first, second = storage(30 * MIB), storage(32 * MIB)
    order = [(first, True), (first, False), (second, True), (second, False)]
    assert reserved([], events(*order), expandable=expandable) == expected


@pytest.mark.parametrize(("limit", "expected"), [(None, 62), (62, 62), (40, 32), (30, 32)])
def test_a_full_device_gets_unused_segments_back_before_it_is_out_of_memory(limit: int | None, expected: int) -> None:
    first, second = storage(30 * MIB), storage(32 * MIB)
    order = [(first, True), (first, False), (second, True), (second, False)]
    asked = None if limit is None else limit * MIB
    assert reserved([], events(*order), limit=asked) == expected * MIB


def test_a_segment_that_holds_a_tensor_is_not_given_back() -> None:
    kept, freed, last = storage(MIB + 512), storage(15 * MIB), storage(30 * MIB)  # the first two share a segment
    order = [(kept, True), (freed, True), (freed, False), (last, True), (last, False), (kept, False)]
    assert reserved([], events(*order), limit=40 * MIB) == 50 * MIB


def test_a_large_block_keeps_a_rest_of_up_to_one_mebibyte() -> None:
    """Such a rest is not split off, so the next request of its size takes another segment."""
    first, second, rest = storage(40 * MIB), storage(39 * MIB), storage(MIB + 512)
    order = [(first, True), (first, False), (second, True), (rest, True), (second, False), (rest, False)]
    assert reserved([], events(*order)) == 60 * MIB


def random_step(chance: random.Random, count: int, most: int) -> Sequence[Event]:
    """`count` allocations and frees with up to `most` storages alive, which are freed in the end."""
    order: list[tuple[Storage, bool]] = []
    alive: list[Storage] = []
    for _ in range(count):
        if alive and chance.random() < len(alive) / most:
            order.append((alive.pop(chance.randrange(len(alive))), False))
        else:
            alive.append(storage(chance.randrange(1, 40) * MIB))
            order.append((alive[-1], True))
    return events(*order, *((each, False) for each in alive))


def test_the_least_limit_is_the_smallest_on_which_the_steps_fit() -> None:
    chance = random.Random(0)
    above = 0
    for _ in range(15):
        step = random_step(chance, 50, 8)
        fitting = [limit for limit in range(0, 1000, 2) if reserved([], step, limit=limit * MIB) <= limit * MIB]
        assert least_limit([], step) == fitting[0] * MIB
        above += len(fitting) < (1000 - fitting[0]) // 2
    assert above  # some steps fit a device and not every larger one


@pytest.mark.parametrize("seed", range(3))
def test_the_least_limit_of_a_long_step_is_found_though_many_limits_are_too_low(seed: int) -> None:
    step = random_step(random.Random(seed), 2000, 300)
    live = max(accumulate(event.change for event in step))
    limits = (live + live * percent // 100 for percent in range(40))
    fitting = next(limit for limit in limits if reserved([], step, limit=limit) <= limit)
    assert live < least_limit([], step) <= 1.02 * fitting


def test_the_least_limit_of_expandable_segments_is_what_they_hold() -> None:
    first, second = storage(30 * MIB), storage(32 * MIB)
    step = events((first, True), (first, False), (second, True), (second, False))
    assert least_limit([], step, expandable=True) == 40 * MIB == reserved([], step, expandable=True)


def test_a_step_of_any_size_has_addresses() -> None:
    large = [storage(1 << 46) for _ in range(8)]
    assert reserved([], events(*((each, True) for each in large), *((each, False) for each in large))) == 8 << 46
