"""The largest batch, or the longest sequence, that fits: found between two predictions, one that fits and one not."""

from __future__ import annotations

from collections.abc import Callable

from memopt.reporting.headline import Largest

#: Rows that no search goes beyond.
MOST_ROWS = 512
#: How near to the line through two predictions a third has to be, as a part of what one more row or stretch adds, for
#: the next one to be told from the line.
_NEAR = 0.25
#: Predictions after which the line is not followed where it gains little.
_LOOKS = 4
#: Segments of the allocator: what one more adds has to be more than these, or it is told from steps instead of a line.
_SEGMENT = 20 << 20


def largest(need: Callable[[int], int], limit: int, *, start: int, most: int, base: int = 0) -> Largest:
    """The largest whole number up to `most` of which `need` is at most `limit`.

    The bytes of a step are piecewise affine in its rows and nearly so in their length, so the line through two
    predictions says where to look next; in the middle, where the allocator's segments make steps of it and the line no
    longer halves what is left. What is answered was predicted, and fits; that one more does not was predicted
    too, or is told from a line on which the answer lies.

    Args:
        need: bytes for a number of rows, or of stretches of tokens; grows with it.
        limit: bytes that there are.
        start: where to begin.
        base: bytes that any number needs.
    """
    known = {0: base}
    fits, too_much = 0, most + 1
    number = max(1, min(start, most))
    while True:
        left = too_much - fits
        slope, at = _line(known, number)
        known[number] = need(number)
        if known[number] <= limit:
            fits = number
            told = known[number] + slope
            near = _NEAR * slope
            if near > _SEGMENT and len(known) > 3 and abs(at - known[number]) <= near < told - limit:
                return Largest(fits)
        else:
            too_much = number
        if too_much == fits + 1:
            return Largest(fits, is_all=fits == most)
        slope, at = _line(known, number)
        guess = number + int((limit - known[number]) // slope) if slope > 0 else 2 * number
        if len(known) > _LOOKS and too_much - fits > left // 2:
            guess = (fits + too_much) // 2
        number = max(fits + 1, min(guess, too_much - 1))


def _line(known: dict[int, int], number: int) -> tuple[float, float]:
    """The slope of the line through the two known points nearest to `number`, and its bytes there."""
    near = sorted(known, key=lambda each: abs(each - number))[:2]
    if len(near) < 2:
        return 0.0, float(known[near[0]])
    slope = (known[near[1]] - known[near[0]]) / (near[1] - near[0])
    return slope, known[near[0]] + slope * (number - near[0])
