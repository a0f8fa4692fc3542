"""Every model type of the installed transformers: what is patched is right, and what was recorded still holds.

A tenth of the types runs in `make test`, all of them in `make test-all`. Bytes are measured by `make coverage` only.
"""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from typing import Any

import pytest
import transformers

from benchmarks.coverage import COVERAGE
from benchmarks.coverage_sums import lost
from benchmarks.zoo import examine, model_types

TYPES = model_types()
#: Neighbours in the alphabet are often towers of one model, so a stride spreads over kinds of models.
SAMPLE = TYPES[4::10]


@cache
def _recorded() -> dict[str, dict[str, Any]]:
    document = json.loads(COVERAGE.read_text())
    if document["versions"]["transformers"] != transformers.__version__:
        return {}
    return {row["model_type"]: row for row in document["rows"]}


@pytest.mark.parametrize(
    "model_type", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.slow) for name in TYPES]
)
def test_patched_and_stock_agree_and_nothing_is_lost(model_type: str) -> None:
    row = examine(model_type, memory=False)
    assert row.status != "wrong", row.reason
    assert not row.unexplained
    assert not row.unshared
    recorded = _recorded().get(model_type)
    assert not lost([recorded] if recorded else [], [dataclasses.asdict(row)])
