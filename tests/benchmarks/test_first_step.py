"""The first step on a GPU is judged: what is wrong, larger or waits is said, and by which line."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from benchmarks import first_step, peaks, tuning
from benchmarks.first_step import ROUNDING_BYTES, verdict

MEBIBYTE = 2**20
CHECK = {
    "id": "gradient.worst_error_ratio",
    "subject": "lm_head.weight",
    "status": "pass",
    "value": 1.0,
    "threshold": 2.0,
}


def row(**changes: Any) -> dict[str, Any]:
    right = {
        "loss": 4.0,
        "stock_loss": 4.0,
        "true_loss": 4.01,
        "checks": [CHECK],
        "missing_gradients": [],
        "kept_bytes": 10 * MEBIBYTE,
        "stock_kept_bytes": 20 * MEBIBYTE,
        "peak_bytes": 30 * MEBIBYTE,
        "stock_peak_bytes": 40 * MEBIBYTE,
        "waits": 1,
        "stock_waits": 1,
        "new_waits": {},
    }
    return right | changes


def test_a_step_that_is_right_and_smaller_passes() -> None:
    assert list(verdict(row())) == []
    assert list(verdict(row(peak_bytes=40 * MEBIBYTE + ROUNDING_BYTES))) == []
    assert list(verdict(row(loss=4.01 + 4.01 * 2**-7))) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss": 4.1}, "in fp64 4.01"),
        ({"loss": float("nan")}, "loss nan"),
        ({"checks": [CHECK | {"status": "fail", "value": 7.0}]}, "of lm_head.weight is 7.00, at most 2.00"),
        ({"checks": [CHECK | {"status": "skip", "value": None}]}, "no number"),
        ({"missing_gradients": ["a", "b"]}, "no gradient of a, b"),
        ({"kept_bytes": 20 * MEBIBYTE + ROUNDING_BYTES + 1}, "kept: 22 MiB, stock 20"),
        ({"peak_bytes": 50 * MEBIBYTE}, "peak: 50 MiB, stock 40"),
        ({"waits": 3, "new_waits": {"loss/readers.py:145": 2}}, "3 times a step, stock 1: 2 x loss/readers.py:145"),
    ],
)
def test_a_step_that_is_wrong_larger_or_waits_falls_short(changes: dict[str, Any], words: str) -> None:
    (line,) = verdict(row(**changes))
    assert words in line


def test_waits_are_counted_by_the_line_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def run() -> None:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)
        warnings.warn("of something else", stacklevel=1)

    (found,) = first_step.waits_of(run, "cuda").items()
    assert found[0].startswith("tests/benchmarks/test_first_step.py:")
    assert found[1] == 2
    assert modes == ["warn", "default"]
    assert not first_step.waits_of(run, "cpu")


def only_llama(path: Path, *arguments: str) -> int:
    return first_step.main(["--model", "Llama", "--way", "autocast", "--json", str(path), *arguments])


def test_a_dry_run_compares_a_patched_step_with_stocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert only_llama(tmp_path / "x.json", "--dry-run") == 0
    content = json.loads((tmp_path / "x.json").read_text())
    assert content["complete"] is True
    assert content["import_seconds"] >= 0
    (found,) = content["rows"]
    assert found["falls_short"] == []
    assert found["peak_bytes"] < found["stock_peak_bytes"]
    assert "1 of 1 patched steps are right" in capsys.readouterr().out


def test_a_gradient_that_a_patch_gets_wrong_falls_short(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = memopt.patch

    def wrong(model: nn.Module, recipe: str) -> None:
        stock(model, recipe)
        model.get_parameter("lm_head.weight").register_hook(lambda gradient: 1.1 * gradient)

    monkeypatch.setattr(memopt, "patch", wrong)
    (line,) = first_step.measure("Llama", "autocast", dry_run=True)["falls_short"]
    assert "of lm_head.weight" in line


def test_a_row_that_dies_is_a_sentence_and_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(model: nn.Module, recipe: str) -> None:
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setattr(memopt, "patch", broken)
    monkeypatch.setattr(first_step, "step", lambda *_: None)
    assert only_llama(tmp_path / "x.json", "--dry-run", "--way", "LoRA") == 0
    content = json.loads((tmp_path / "x.json").read_text())
    assert [each["error"] for each in content["rows"]] == ["RuntimeError: no such kernel"] * 2
    assert first_step.shortfalls(content["rows"])[0] == "Llama, autocast: RuntimeError: no such kernel"
    assert "Traceback" not in capsys.readouterr().err


def test_a_predicted_peak_is_held_to_its_margin() -> None:
    right = {"case": "x", "predicted": 102, "allocated": 100, "predicted_reserved": 199, "reserved": 200}
    assert list(peaks.shortfalls([right, right | {"reserved": None}])) == []
    assert list(peaks.shortfalls([right | {"predicted": 104}])) == ["x: predicted is +4.00% from allocated; at most 3%"]
    assert list(peaks.shortfalls([{"case": "x", "error": "out of memory"}])) == ["x: out of memory"]


def test_tuning_goes_on_only_on_the_same_device_and_versions(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    content = {"device": {"name": "a"}, "versions": {"torch": "1"}, "dry_run": False}
    rows = [{"kernel": "k"}, {"kernel": "l", "device_is_broken": True}]
    assert tuning._earlier(path, content) == []
    path.write_text(json.dumps({**content, "complete": False, "rows": rows}))
    assert tuning._earlier(path, content) == rows[:1]
    assert tuning._earlier(path, content | {"device": {"name": "b"}}) == []
    path.write_text(json.dumps({**content, "complete": True, "entries_left_out": 0, "rows": rows}))
    assert tuning._earlier(path, content) == []
    path.write_text("{")
    assert tuning._earlier(path, content) == []
