"""Which model types `make test` examines: a thirtieth of the quick ones, a sixtieth of the others, new ones every day.

Thirty days see all quick types, sixty days all.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

SHARES = 60
#: Of the quick types a share has this part.
QUICK_SHARES = 30
#: Environment variable that chooses the share, 0 to 59.
VARIABLE = "MEMOPT_ZOO_SHARE"
_DAY = 24 * 3600


def share() -> tuple[int, str]:
    """The number of the share, and where it comes from.

    It follows from the date of the last commit, so that a commit is tested alike whenever that is done; without git,
    from today's.

    Raises:
        ValueError: the variable holds no number from 0 to 59.
    """
    chosen = os.environ.get(VARIABLE)
    if chosen is not None:
        if chosen not in map(str, range(SHARES)):
            raise ValueError(f"{VARIABLE} must be a number from 0 to {SHARES - 1}, and is {chosen!r}.")
        return int(chosen), VARIABLE
    committed = _date_of_commit()
    if committed is None:
        return share_of_day(time.time()), "today"
    return share_of_day(committed), "the day of the last commit"


def share_of_day(seconds: float) -> int:
    """The share of the day in which this moment lies, in seconds since 1970."""
    return int(seconds // _DAY) % SHARES


def types_of_share(types: Sequence[str], number: int, is_quick: Callable[[str], bool]) -> list[str]:
    """Those of `types`, which are sorted: neighbours are often parts of one model, which a stride spreads."""
    quick = [name for name in types if is_quick(name)]
    slow = [name for name in types if not is_quick(name)]
    return quick[number % QUICK_SHARES :: QUICK_SHARES] + slow[number::SHARES]


def _date_of_commit() -> float | None:
    command = ["git", "log", "-1", "--format=%ct"]
    try:
        answer = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
        return float(answer.stdout)
    except (OSError, ValueError, subprocess.CalledProcessError):
        return None
