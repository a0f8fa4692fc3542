"""The kind of site that this patch adds; `probe.py` finds such sites."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TileSite:
    """A module of a block that maps each token on its own."""

    name: str
    numbers: int
    """Elements that the outputs of all its matrix products have for one token."""
