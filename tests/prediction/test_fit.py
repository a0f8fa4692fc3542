"""The largest size that fits."""

from __future__ import annotations

import random

from memopt.prediction.alternatives import largest
from memopt.prediction.headline import Largest


def test_it_is_the_last_that_fits_whatever_the_pieces() -> None:
    chance = random.Random(0)
    for _ in range(2000):
        base, slope, bend, extra = (chance.randrange(*span) for span in ((0, 900), (1, 60), (1, 90), (0, 60)))
        most, start = chance.randrange(1, 200), chance.randrange(1, 250)
        asked: list[int] = []

        def need(rows: int, base: int = base, slope: int = slope, bend: int = bend, extra: int = extra) -> int:
            asked.append(rows)  # noqa: B023
            return (base + slope * rows + extra * max(0, rows - bend)) << 30

        found = largest(need, 1000 << 30, start=start, most=most)
        right = max((rows for rows in range(1, most + 1) if need(rows) <= 1000 << 30), default=0)
        assert found == Largest(right, is_all=right == most)


def test_few_predictions_are_enough_on_a_line() -> None:
    asked: list[int] = []

    def need(rows: int) -> int:
        asked.append(rows)
        return (10_000 + 70 * rows) << 30

    assert largest(need, 60_000 << 30, start=1, most=5000).value == 714
    assert len(asked) <= 5


def test_few_predictions_are_enough_on_steps() -> None:
    """What a small model reserves grows by whole segments: a line through two of its points tells little."""
    for wide, limit in ((37, 900), (100, 520), (9, 1500), (450, 600)):
        asked: list[int] = []

        def need(rows: int, wide: int = wide) -> int:
            asked.append(rows)  # noqa: B023
            return (500 + 20 * (rows // wide) + (rows > 250)) << 20

        found = largest(need, limit << 20, start=1, most=512, base=500 << 20).value
        assert need(found) <= limit << 20
        assert found == 512 or need(found + 1) > limit << 20
        assert len(asked) <= 24
