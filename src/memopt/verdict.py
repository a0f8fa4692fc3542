"""What a verification says: checks with their numbers, thresholds and reasons, and the verdict they add up to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["pass", "warn", "fail", "skip"]
Level = Literal["weights", "forward", "gradient", "memory"]
LEVELS: tuple[Level, ...] = ("weights", "forward", "gradient", "memory")


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
    """What `value` is, in words."""
    value: float | None = None
    threshold: float | None = None
    threshold_reason: str = ""
    reference: str = ""
    """What the value was taken against, e.g. "fp64 run of the original"."""
    n: int = 0
    """Number of elements, tensors or bytes that went into the value."""
    detail: str = ""


@dataclass(frozen=True)
class Verdict:
    """All checks of one verification."""

    checks: tuple[Check, ...]

    @classmethod
    def of(cls, checks: Iterable[Check]) -> Verdict:
        return cls(tuple(checks))

    def __str__(self) -> str:
        """The table that `memopt verify` prints, and the status."""
        from memopt.reporting.terminal import checks_table
        from memopt.reporting.text import as_text

        return f"{as_text([checks_table(self)])}\n\nstatus: {self.status}"

    @property
    def status(self) -> Literal["pass", "fail", "inconclusive"]:
        statuses = Counter(check.status for check in self.checks)
        if statuses["fail"]:
            return "fail"
        return "inconclusive" if statuses["skip"] or not self.checks else "pass"

    def exit_code(self, *, allow_skips: bool = False) -> int:
        """0 all passed, 1 a check failed, 3 a check was skipped (0 with `allow_skips`)."""
        if self.status == "fail":
            return 1
        return 3 if self.status == "inconclusive" and not (allow_skips and self.checks) else 0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {"status": self.status, "checks": [asdict(check) for check in self.checks]}


def ratio_status(value: float, passes: float, warns: float) -> Status:
    """pass up to `passes`, warn up to `warns`, fail above and for NaN."""
    if value <= passes:
        return "pass"
    return "warn" if value <= warns else "fail"
