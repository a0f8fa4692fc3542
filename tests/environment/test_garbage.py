"""Python's garbage collector during memopt's work, and afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

import memopt
from memopt.environment.garbage import collected_seldom
from memopt.trace import trace
from tests.factories import tiny_model


@pytest.fixture(autouse=True)
def _thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_a_prediction_collects_seldom_and_leaves_the_thresholds_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model("llama").config.save_pretrained(tmp_path)
    inside = []

    def noting(*given: object, own: object = trace.record, **named: object) -> object:
        inside.append(gc.get_threshold())
        return own(*given, **named)  # type: ignore[operator]

    monkeypatch.setattr(trace, "record", noting)
    memopt.fit(tmp_path, seq=8)
    assert inside
    assert all(each[0] >= 50_000 for each in inside)
    assert gc.get_threshold() == (700, 10, 10)


def test_the_thresholds_come_back_after_an_error() -> None:
    with pytest.raises(KeyError), collected_seldom():
        raise KeyError
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("own", [(0, 10, 10), (1_000_000, 100, 1000)], ids=["never", "less often"])
def test_a_user_who_collects_less_often_keeps_that(own: tuple[int, int, int]) -> None:
    gc.set_threshold(*own)
    with collected_seldom():
        assert all(now >= before for now, before in zip(gc.get_threshold(), own, strict=True))
        assert bool(gc.get_threshold()[0]) == bool(own[0])
