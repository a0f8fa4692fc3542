"""A collection is short after one was slow, and garbage of a test is still found."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator

import pytest

from tests.support.garbage import ShortCollections


class Cycle:
    def __init__(self) -> None:
        self.own = self


@pytest.fixture
def collections() -> Iterator[ShortCollections]:
    made = ShortCollections()
    yield made
    gc.callbacks.remove(made._time)


def seconds() -> float:
    started = time.thread_time()
    gc.collect()
    return time.thread_time() - started


def test_what_lives_is_looked_at_once(collections: ShortCollections) -> None:
    kept = [[number] for number in range(1_000_000)]
    slow = seconds()
    assert slow > collections.SLOW
    collections.freeze_if_slow()
    assert seconds() < slow / 2
    assert len(kept) == 1_000_000


def test_garbage_is_collected_before_and_after(collections: ShortCollections) -> None:
    before = weakref.ref(Cycle())
    collections._is_slow = True
    collections.freeze_if_slow()
    assert before() is None
    after = weakref.ref(Cycle())
    gc.collect()
    assert after() is None
