"""Right checkpoints verify: slices of the clean runs, and what they are."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest

from memopt.patches.checks import Check
from memopt.plan.shipped import shipped
from memopt.verification.run import Verdict
from tests.mutation import clean
from tests.mutation.clean import GOOD, WIDTHS, Case, cases, run
from tests.mutation.folders import Workshop, workshop
from tests.mutation.models import FAMILIES, Checkpoint

_SOME = (
    Case(Checkpoint("mistral", "bf16", "outliers", 1)),
    Case(Checkpoint("distilbert", "fp16", "outliers")),
    Case(Checkpoint("llama", "bf16"), "int8"),
    Case(Checkpoint("gpt2", "bf16"), "int8"),
    Case(Checkpoint("llama", "fp32"), "lowmemory-bp"),
    Case(Checkpoint("qwen3", "fp32"), "sampled"),
    Case(Checkpoint("distilbert", "bf16"), "exact-levels"),
)
#: Slices of the whole.
_PARTS = 36


@pytest.mark.parametrize("case", _SOME, ids=str)
@pytest.mark.rotates(4)
def test_a_right_checkpoint_verifies(case: Case) -> None:
    with workshop() as place:
        result = run(case, place)
    assert result.outcome in GOOD, result


@pytest.mark.slow
@pytest.mark.parametrize("part", range(1, _PARTS + 1))
def test_every_right_checkpoint_verifies(part: int) -> None:
    assert clean.main(["--slice", f"{part}/{_PARTS}"]) == 0


def test_there_are_five_hundred_over_25_architectures_in_every_dtype_and_kind_of_weights() -> None:
    chosen = [each.checkpoint for each in cases() if each.recipe == "exact"]
    assert len(set(map(str, chosen))) == len(chosen) >= 500
    assert len({each.architecture for each in chosen}) >= 25
    assert {each.kind for each in chosen} == {"random", "outliers", "pretrained"}
    assert len({each.seed for each in chosen}) == 3
    assert len(Counter(each.dtype for each in chosen)) == 3


def test_every_shipped_recipe_is_run_on_25_families_in_fp32_and_bf16() -> None:
    ran = {(each.checkpoint.architecture, each.checkpoint.dtype, each.recipe) for each in cases()}
    assert len(set(map(str, cases()))) == len(cases())
    assert len(FAMILIES) >= 25
    assert ran >= set(itertools.product(FAMILIES, WIDTHS, shipped()))


def test_an_alarm_and_a_crash_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def verify(folder: Path) -> Verdict:
        return Verdict((Check("forward.error_ratio", "forward", "logits", "fail", value=3.0, threshold=1.25),))

    monkeypatch.setattr(clean, "verify", verify)
    monkeypatch.setattr(Workshop, "patched", lambda self, checkpoint, recipe: tmp_path)
    place, case = Workshop(tmp_path), Case(Checkpoint("llama", "fp32"))
    assert run(case, place).outcome == "ALARM"
    monkeypatch.delattr(Workshop, "patched")
    assert run(case, place).outcome == "CRASH"
