"""The kind of site that this patch adds; `probe.py` finds such sites."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class SumNormSite:
    """A module whose whole forward is norm(between(dense(hidden)) + residual)."""

    name: str
    dense: str
    between: str | None
    """Child module (a dropout) after dense."""
    norm: str
    """Name of the child module, like `dense`. The norm also has a `memopt.walk.sites.NormSite`."""
    arguments: tuple[str, str]
    """Names of the forward's two arguments, in order."""
    residual: Literal[0, 1]
    """Position of the argument that is added; the other one is the input of dense."""
