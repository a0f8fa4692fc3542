"""Every rotating test runs on one of its days, and of many cases some run on each of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.rotation import left_for_other_days


class Item:
    def __init__(self, file: str, days: int | None) -> None:
        self.path, self._days = Path(file), days

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return pytest.mark.rotates(self._days).mark if name == "rotates" and self._days else None


@pytest.mark.parametrize("cases", [1, 2, 3, 7, 12])
def test_every_case_runs_on_one_of_its_days(cases: int) -> None:
    items = [Item("test_a.py", 3) for _ in range(cases)]
    others = [Item("test_a.py", None), Item("test_b.py", 5), Item("test_a.py", 2)]
    ran = []
    for day in range(10, 13):
        left = left_for_other_days([others[0], *items, *others[1:]], day)
        assert others[0] not in left
        ran.append([item for item in items if item not in left])
    assert sorted(id(item) for today in ran for item in today) == sorted(map(id, items))
    assert cases < 3 or all(ran)
