"""Right checkpoints verify: slices of the clean runs, and what they are."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from memopt.checks import Check
from memopt.verification.verdict import Verdict
from tests.mutation import clean
from tests.mutation.clean import GOOD, checkpoints, run
from tests.mutation.folders import Workshop, workshop
from tests.mutation.models import Checkpoint

_SOME = (Checkpoint("mistral", "bf16", "outliers", 1), Checkpoint("distilbert", "fp16", "outliers"))
#: Slices of the whole.
_PARTS = 16


@pytest.mark.parametrize("checkpoint", _SOME, ids=str)
def test_a_right_checkpoint_verifies(checkpoint: Checkpoint) -> None:
    with workshop() as place:
        result = run(checkpoint, place)
    assert result.outcome in GOOD, result


@pytest.mark.slow
@pytest.mark.parametrize("part", range(1, _PARTS + 1))
def test_every_right_checkpoint_verifies(part: int) -> None:
    assert clean.main(["--slice", f"{part}/{_PARTS}"]) == 0


def test_there_are_five_hundred_over_25_architectures_in_every_dtype_and_kind_of_weights() -> None:
    chosen = checkpoints()
    assert len(set(map(str, chosen))) == len(chosen) >= 500
    assert len({each.architecture for each in chosen}) >= 25
    assert {each.kind for each in chosen} == {"random", "outliers", "pretrained"}
    assert len({each.seed for each in chosen}) == 3
    assert len(Counter(each.dtype for each in chosen)) == 3


def test_an_alarm_and_a_crash_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def verify(folder: Path) -> Verdict:
        return Verdict((Check("forward.error_ratio", "forward", "logits", "fail", value=3.0, threshold=1.25),))

    monkeypatch.setattr(clean, "verify", verify)
    monkeypatch.setattr(Workshop, "patched", lambda self, checkpoint: tmp_path)
    place, checkpoint = Workshop(tmp_path), Checkpoint("llama", "fp32")
    assert run(checkpoint, place).outcome == "ALARM"
    monkeypatch.delattr(Workshop, "patched")
    assert run(checkpoint, place).outcome == "CRASH"
