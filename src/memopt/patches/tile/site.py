"""The kind of site that this patch brings; `probe.py` finds them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TileSite:
    """A module of a block that maps each token on its own."""

    name: str
    numbers: int
    """Of all its products, for one token."""
