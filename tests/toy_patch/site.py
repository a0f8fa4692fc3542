"""The kind of site that the toy patch adds; `probe.py` finds such sites."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ToySite:
    """A module that computes x * sigmoid(1.702 x), as the probe finds it."""

    name: str
