"""What one check of a verification found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["pass", "warn", "fail", "skip"]
Level = Literal["weights", "forward", "gradient", "training", "memory"]
LEVELS: tuple[Level, ...] = ("weights", "forward", "gradient", "training", "memory")


@dataclass(frozen=True)
class Check:
    """One thing that was checked."""

    id: str
    """Stable name, e.g. ``forward.error_ratio``."""
    level: Level
    subject: str
    """What was checked: a file, tensors, an output, parameters, a block."""
    status: Status
    metric: str = ""
    """What `value` is."""
    value: float | None = None
    threshold: float | None = None
    threshold_reason: str = ""
    reference: str = ""
    """What was compared with, e.g. "fp64 run of the original"."""
    n: int = 0
    """Number of elements, tensors or bytes that were checked."""
    detail: str = ""


def ratio_status(value: float, passes: float, warns: float) -> Status:
    """pass up to `passes`, warn up to `warns`, fail above and for NaN."""
    if value <= passes:
        return "pass"
    return "warn" if value <= warns else "fail"
