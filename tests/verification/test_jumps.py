"""Which rows jump where results are rounded at random, and how long that is looked for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from memopt.verification import forward
from memopt.verification.run import verify
from memopt.verification.stochastic import JumpingRows
from tests.mutation.folders import workshop
from tests.mutation.models import Checkpoint

ROWS, USUAL = 20, 1e-3


def _run(*jumping: int, size: float = 1.0) -> list[dict[str, Tensor]]:
    """Two batches of rows of 4; those of the first that are named are off."""
    logits = torch.zeros(2, 1, ROWS, 4)
    for row in jumping:
        logits[0, 0, row] = size
    return [{"logits": batch} for batch in logits]


def _rows(*judged: int) -> JumpingRows:
    return JumpingRows(_run(), {"logits": USUAL}, [_run(*judged), _run()])


def _found(rows: JumpingRows) -> list[int]:
    return rows.rows()["logits"][0].nonzero()[:, 1].tolist()


def test_a_row_that_jumps_in_a_run_of_the_original_is_left_out() -> None:
    rows = _rows()
    rows.add(_run(3))
    rows.add(_run(5))
    rows.add(_run(7, size=15 * USUAL))
    assert _found(rows) == [3, 5]


def test_a_judged_run_is_no_reason_to_leave_a_row_out() -> None:
    rows = _rows(3)
    rows.add(_run(5))
    assert _found(rows) == [5]
    assert rows.may_jump_in_more([_run(), _run(5)])
    assert not rows.may_jump_in_more([_run(), _run(3)])


@pytest.mark.parametrize("judged", [[], [0, 1, 2, 3, 4]], ids=["none", "more than a tenth"])
def test_nothing_more_is_looked_for(judged: list[int]) -> None:
    assert not _rows(*judged).may_jump_in_more([_run()])


def test_where_many_rows_jump_none_is_left_out() -> None:
    rows = _rows(0)
    rows.add(_run(0, 1, 2, 3, 4))
    assert not rows.rows()


def test_runs_of_other_fields_or_shapes_are_not_compared() -> None:
    other = [{"logits": batch["logits"][:, 1:]} for batch in _run(1)]
    rows = JumpingRows(_run(), {"logits": USUAL}, [other])
    rows.add(_run(3))
    assert _found(rows) == [3]
    assert not rows.may_jump_in_more([_run()])
    rows.add([{}, {}])
    assert not rows.rows()


@pytest.mark.rotates(3)
def test_a_choice_that_few_runs_turn_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    # Its router chooses another expert in the patched run, and in a third of the runs with random rounding.
    added: list[int] = []
    monkeypatch.setattr(forward.JumpingRows, "add", _counted(forward.JumpingRows.add, added))
    with workshop() as place:
        verdict = verify(place.patched(Checkpoint("gpt_oss", "fp16", "random", 1)), level=["forward"])
    assert verdict.status == "pass", [check for check in verdict.checks if check.status != "pass"]
    assert len(added) > forward._ROUNDED


def _counted(add: Callable[..., None], calls: list[int]) -> Callable[..., None]:
    def counted(self: JumpingRows, run: list[dict[str, Tensor]]) -> None:
        calls.append(len(calls))
        add(self, run)

    return counted
