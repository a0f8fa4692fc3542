"""Every model type of the installed transformers: what is patched is right, and what was recorded still holds.

A share of the types runs in `make test`, another one each day (`tests.zoo.share`), all of them in `make test-all`.
Bytes are measured by `make coverage` only.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import transformers

from memopt.kernels.norm import ops as norm_ops
from memopt.recompute.expression import step
from memopt.recompute.steps import clone
from memopt.saved import handles
from tests.zoo.build import model_types
from tests.zoo.coverage_sums import COVERAGE, lost
from tests.zoo.examine import examine
from tests.zoo.share import share, types_of_share

TYPES = model_types()
_DOCUMENT = json.loads(COVERAGE.read_text())
RECORDED: dict[str, dict[str, Any]] = {row["model_type"]: row for row in _DOCUMENT["rows"]}
#: Recorded seconds of a quick type, and of the longest that `make test` examines.
QUICK_SECONDS, MOST_SECONDS = 4, 15


def _takes_at_most(seconds: float, model_type: str) -> bool:
    row = RECORDED.get(model_type)
    return row is None or (row["seconds"] < seconds and row["status"] != "not run")


def is_quick(model_type: str) -> bool:
    return _takes_at_most(QUICK_SECONDS, model_type)


#: The share of this run, but for those that take long.
SAMPLE = [name for name in types_of_share(TYPES, share()[0], is_quick) if _takes_at_most(MOST_SECONDS, name)]


@pytest.mark.walks(shared=True)
@pytest.mark.parametrize(
    "model_type", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.slow) for name in TYPES]
)
def test_patched_and_stock_agree_and_nothing_is_lost(model_type: str) -> None:
    row = examine(model_type, memory=False)
    assert row.status != "wrong", row.reason
    assert not row.unexplained
    same_release = _DOCUMENT["versions"]["transformers"] == transformers.__version__
    before = [RECORDED[model_type]] if same_release and model_type in RECORDED else []
    assert not lost(before, [dataclasses.asdict(row)])


def test_a_backward_that_is_slightly_off_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = norm_ops.backward

    def off(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        dx, *rest = stock(*args, **kwargs)
        return (None if dx is None else dx * (1 + 1e-7), *rest)

    monkeypatch.setattr(norm_ops, "backward", off)
    row = examine("bert", memory=False)
    assert row.status == "wrong"
    assert "gradients differ" in row.reason


def test_a_copy_that_is_recomputed_wrongly_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = handles.after
    monkeypatch.setattr(
        handles,
        "after",
        lambda value, steps: stock(value, steps).flip(0) if step(clone) in steps else stock(value, steps),
    )
    assert examine("gpt_neox", memory=False).status == "wrong"
