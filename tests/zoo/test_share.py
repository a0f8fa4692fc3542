"""Thirty days in a row see every quick model type once, sixty days all."""

from __future__ import annotations

import subprocess

import pytest

from tests.zoo import share as module
from tests.zoo.build import model_types
from tests.zoo.share import QUICK_SHARES, SHARES, VARIABLE, share, share_of_day, types_of_share

DAY = 24 * 3600.0


def is_quick(model_type: str) -> bool:
    return not model_type.startswith(("a", "q"))


def test_any_sixty_days_in_a_row_have_every_share() -> None:
    for start in (0.0, 1.7e9, 1.7e9 + 3 * DAY):
        assert {share_of_day(start + DAY * day) for day in range(SHARES)} == {*range(SHARES)}


def test_thirty_shares_in_a_row_have_every_quick_type_once_and_sixty_every_other() -> None:
    types = model_types()
    shares = [types_of_share(types, number, is_quick) for number in range(SHARES)]
    for start in (0, 7, SHARES - QUICK_SHARES):
        seen = [name for names in shares[start : start + QUICK_SHARES] for name in names if is_quick(name)]
        assert sorted(seen) == [*filter(is_quick, types)]
    slow = [name for names in shares for name in names if not is_quick(name)]
    assert sorted(slow) == [name for name in types if not is_quick(name)]
    assert max(map(len, shares)) - min(map(len, shares)) <= 2


def test_the_variable_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "7")
    assert share() == (7, VARIABLE)
    monkeypatch.setenv(VARIABLE, "60")
    with pytest.raises(ValueError, match="0 to 59"):
        share()


def test_a_commit_is_tested_alike_on_every_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(module, "_date_of_commit", lambda: 1.7e9)
    assert share() == (share_of_day(1.7e9), "the day of the last commit")


def test_without_git_it_is_todays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)

    def missing(*args, **kwargs):
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", missing)
    monkeypatch.setattr(module.time, "time", lambda: 63 * DAY)
    assert share() == (3, "today")
