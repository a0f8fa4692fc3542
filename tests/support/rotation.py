"""Long tests, and tests whose many cases look at one thing: `make test` runs a part of them, another one every day.

`@pytest.mark.rotates(3)` says that a third is enough for a day of commits. Without the variable, and so in
`make test-all` and where somebody runs a file or a test by name, all run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

#: Environment variable that asks for the part of the day.
ROTATE = "MEMOPT_ROTATE"


def left_for_other_days(items: Sequence[pytest.Item], day: int) -> list[pytest.Item]:
    """The members of `items` that run on other days.

    Each runs on one day in ``rotates(days)``. Neighbours in a file run on different days, so that of as many cases as
    days some run on every day.
    """
    files: dict[Path, list[tuple[pytest.Item, int]]] = defaultdict(list)
    for item in items:
        if marker := item.get_closest_marker("rotates"):
            files[item.path].append((item, marker.args[0]))
    return [item for each in files.values() for number, (item, days) in enumerate(each) if (number - day) % days]
