"""The report as JSON-ready data: bytes as integers, keys only ever added."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from memopt.patches.capabilities import Reports
from memopt.patches.registry import having
from memopt.reporting.account import Account
from memopt.reporting.compare import BlockKind, Comparison, Row
from memopt.reporting.timeline import KINDS


def comparison_dict(comparison: Comparison) -> dict[str, Any]:
    """Fields of the report's JSON document."""
    return {
        "model": {"id": comparison.model, "class": comparison.model_class},
        "recipe": comparison.recipe,
        "training": dataclasses.asdict(comparison.training) | {"lora_targets": list(comparison.training.lora_targets)},
        "inputs": comparison.inputs,
        "unit_bytes": comparison.before.unit,
        "before": _account(comparison.before),
        "after": _account(comparison.after),
        "block_kinds": [_kind(kind) for kind in comparison.kinds()],
        "outside_blocks": [_row(row) for row in comparison.rest()],
        "parts": [{"part": name, "before": before, "after": after} for name, before, after in comparison.parts()],
        "summary": {
            "before": comparison.before.total,
            "after": comparison.after.total,
            "change": comparison.change,
        },
        "step": {"before": _step(comparison.before), "after": _step(comparison.after)},
        **{patch.section: None for patch in having(Reports) if patch.section},
        **{section.key: section.to_dict() for section in comparison.sections},
        "notes": list(comparison.notes),
    }


def _account(account: Account) -> dict[str, Any]:
    return {
        "total": account.total,
        "unseen": account.unseen,
        "per_block": account.per_block(),
        "per_cause": account.per_cause(),
    }


def _step(account: Account) -> dict[str, Any] | None:
    """The peak of the step; None where it is not known."""
    step = account.step
    if step is None:
        return None
    per_kind, per_place = dict.fromkeys(KINDS, 0), Counter[str]()
    for life, kind in step.at_peak:
        per_kind[kind] += life.nbytes
        per_place[account.block_of(life.module) or life.module] += life.nbytes
    return {
        "after_forward": step.kept,
        "peak": step.peak,
        "peak_in": step.last.module if step.last else "",
        "per_kind": per_kind,
        "per_module": dict(per_place.most_common()),
        "most_of_kind": step.most,
    }


def _kind(kind: BlockKind) -> dict[str, Any]:
    rows = [_row(row) for row in kind.rows]
    return {"blocks": list(kind.blocks), "before": kind.before, "after": kind.after, "rows": rows}


def _row(row: Row) -> dict[str, Any]:
    return {
        "cause": row.cause,
        "dtype": row.dtype,
        "shape": list(row.shape),
        "before": {"bytes": row.before, "tensors": row.count_before},
        "after": {"bytes": row.after, "tensors": row.count_after},
    }
