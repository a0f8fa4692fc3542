"""What a constructor may take before it is stopped: time, memory, parts."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import pytest
from torch import nn

from memopt.errors import ModelError
from memopt.walk.models import limits


def _loop() -> None:
    while True:
        pass


def _grow() -> None:
    found = []
    for number in range(10**9):
        found.append((number,))


def _swallow() -> None:
    with contextlib.suppress(BaseException):
        _loop()


class TestLimits:
    @pytest.mark.parametrize("build", [_loop, _grow, _swallow])
    def test_a_constructor_that_takes_too_much_is_stopped(
        self, build: Callable[[], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(limits, "_MAX_SECONDS", 10 if build is _grow else 0.3)
        monkeypatch.setattr(limits, "_MAX_BYTES", 50 << 20)

        def run() -> None:
            with limits.watched_build():
                build()

        with pytest.raises(ModelError, match="more than 50 MiB" if build is _grow else "more than 0 seconds"):
            run()

    def test_a_constructor_that_ignores_it_is_stopped_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits, "_MAX_SECONDS", 0.1)
        monkeypatch.setattr(limits, "_STOPPED_AFTER", 0.1)
        started = time.thread_time()

        def build() -> None:
            _swallow()  # as a finalizer does
            while time.thread_time() < started + 20:
                pass

        with pytest.raises(ModelError, match="more than 0 seconds"), limits.watched_build():
            build()
        assert time.thread_time() < started + 10

    def test_what_is_quick_is_left_alone(self) -> None:
        for _ in range(20):
            with limits.watched_build():
                pass
        assert not [thread for thread in threading.enumerate() if thread.name == "memopt-watch"]

    def test_parts_are_counted_in_this_thread_alone_and_hooks_are_removed(self) -> None:
        with limits.bounded_build(parts=5):
            other = threading.Thread(target=lambda: nn.Sequential(*(nn.Linear(2, 2) for _ in range(9))))
            other.start()
            other.join()
            nn.Linear(2, 2)
            with pytest.raises(ModelError, match="5 modules and parameters"):
                nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        nn.Sequential(*(nn.Linear(2, 2) for _ in range(9)))
