"""The result of one check of a verification."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, cast

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
    """The checked thing: a file, tensors, an output, parameters, a block."""
    status: Status
    metric: str = ""
    """What `value` is."""
    value: float | None = None
    threshold: float | None = None
    threshold_reason: str = ""
    reference: str = ""
    """The thing compared with, e.g. "fp64 run of the original"."""
    n: int = 0
    """Number of elements, tensors or bytes that were checked."""
    detail: str = ""

    @property
    def excess(self) -> float:
        """`value` divided by its threshold (`value` itself without one); infinite for NaN."""
        value = self.value or 0.0
        if math.isnan(value):
            return math.inf
        return value / self.threshold if self.threshold else value


def limited(
    id: str,
    subject: str,
    value: float,
    limit: float,
    metric: str,
    reason: str = "",
    reference: str = "",
    n: int = 0,
    detail: str = "",
    *,
    level: Level | None = None,
    warns: float | None = None,
) -> Check:
    """A check that passes up to `limit`, warns up to `warns`, and fails above both and for NaN; `level` defaults to the
    first part of `id`."""
    level = level or _level_of(id)
    status: Status = "pass" if value <= limit else "warn" if warns is not None and value <= warns else "fail"
    return Check(id, level, subject, status, metric, value, limit, reason, reference, n, detail)


def skipped(id: str, subject: str, why: str) -> Check:
    """A check that could not be made."""
    return Check(id, _level_of(id), subject, "skip", detail=why)


def worst_name(values: Mapping[str, float]) -> str:
    """The name with the largest value, NaN above all; empty if there is none."""
    return max(values, key=lambda name: (values[name] != values[name], values[name]), default="")


def worst_of_each(checks: Iterable[Check]) -> list[Check]:
    """The worst check of each id: failures first, then warnings, then the largest :attr:`Check.excess`."""
    found: dict[str, Check] = {}
    for check in checks:
        worst = found.setdefault(check.id, check)
        if _rank(check) > _rank(worst):
            found[check.id] = check
    return list(found.values())


def _rank(check: Check) -> tuple[bool, bool, float]:
    return check.status == "fail", check.status == "warn", check.excess


def _level_of(id: str) -> Level:
    return cast(Level, id.partition(".")[0])
