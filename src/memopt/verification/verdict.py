"""The result of all checks of a verification."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Literal

from memopt.patches.checks import Check
from memopt.reporting.terminal import checks_table
from memopt.reporting.text import as_text


@dataclass(frozen=True)
class Verdict:
    """All checks of one verification."""

    checks: tuple[Check, ...]

    def __str__(self) -> str:
        """The table that `memopt verify` prints, and the status."""
        return f"{as_text([checks_table(self.checks)])}\n\nstatus: {self.status}"

    __repr__ = __str__

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
