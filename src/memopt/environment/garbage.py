"""How often Python's garbage collector looks for reference cycles."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_SELDOM = (50_000, 20, 100)
"""Thresholds of `gc.set_threshold` for work that makes millions of objects which live."""


def collect_seldom() -> None:
    """Collect seldom in this process, unless it collects even less often."""
    gc.set_threshold(*(now and max(now, least) for now, least in zip(gc.get_threshold(), _SELDOM, strict=True)))


@contextlib.contextmanager
def collected_seldom() -> Iterator[None]:
    """Inside, as :func:`collect_seldom`. Also a decorator. A trace makes millions of events that live to its end, and
    with Python's own thresholds collections that read them all are a quarter of its time."""
    before = gc.get_threshold()
    collect_seldom()
    try:
        yield
    finally:
        gc.set_threshold(*before)
