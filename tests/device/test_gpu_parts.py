"""Every part of the plan of GPU runs, dry on tiny shapes: none dies of its own error on the day a device is there.

A dry run takes the code of the real one, with a CUDA device, emulated or not. Processes of their own are run inside
this one, because an emulated device is a matter of one process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import (
    block,
    block_models,
    first_step,
    gpu_tests,
    kernels,
    loss,
    measure,
    peaks,
    sampled_kernels,
    tuning,
)
from benchmarks.gpu_plan import PARTS
from memopt.kernels.base.device import INTERPRETED
from memopt.prediction import measure as prediction
from tests.benchmarks.test_measure import InThisProcess

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, real or emulated")

#: What a provider may say of a machine that lacks it.
NOT_HERE = ("liger_kernel is not installed", "No module named 'liger_kernel'", "not supported by Liger", "peft is not")


@pytest.fixture(autouse=True)
def _short_timings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_WARM_UP": 1, "_PROBES": 1, "_LEAST": 2, "_MOST": 2, "_BUFFER": 2**16}.items():
        monkeypatch.setattr(measure.Stopwatch, name, value)
    monkeypatch.setattr(block, "_ROUND_MS", 0.0)
    kernels._stopwatch.cache_clear()


class KernelsInThisProcess(InThisProcess):
    def handler(self, provider: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
        return lambda request: {"rows": kernels.measure(kernels.Shape(**request), provider, dry_run=True)}


def dry(main: Callable[[list[str]], int], path: Path, *arguments: str) -> dict[str, Any]:
    """The result of a dry run, which has to be complete and of the CUDA device."""
    assert main(["--dry-run", "--json", str(path), *arguments]) == 0
    content: dict[str, Any] = json.loads(path.read_text())
    assert content["complete"] is True
    assert content["dry_run"] is True
    assert content["device"]["name"] == torch.cuda.get_device_name()
    return content


def errors(rows: list[dict[str, Any]]) -> list[str]:
    """What rows say went wrong, but for what is not installed here."""
    found = [str(row["error"]) for row in rows if "error" in row]
    return [each for each in found if not any(words in each for words in NOT_HERE)]


def test_every_measuring_part_is_dry_run_here() -> None:
    here = {each.MODULE for each in (block, first_step, kernels, loss, peaks, sampled_kernels, tuning)}
    assert {part.module for part in PARTS} == {*here, "pytest"}


@pytest.mark.parametrize(
    ("model", "way"),
    [*(("Llama", way) for way in first_step.WAYS), *((model, "exact-levels") for model in ("BERT", "ViT", "T5"))],
)
def test_a_first_step(model: str, way: str, tmp_path: Path) -> None:
    (row,) = dry(first_step.main, tmp_path / "x.json", "--model", model, "--way", way)["rows"]
    assert "error" not in row, row["error"]
    assert row["waits"] <= row["stock_waits"], row["new_waits"]
    assert 0 < row["kept_bytes"] < row["peak_bytes"]
    if INTERPRETED:
        assert row["falls_short"] == []


def test_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "Worker", KernelsInThisProcess)
    monkeypatch.setattr(kernels, "_asked", lambda shape: ["memopt", "eager"])
    if not INTERPRETED:  # launches are counted and not run: nothing has a value
        monkeypatch.setattr(kernels, "_error", lambda results, truth: 0.0)
    content = dry(kernels.main, tmp_path / "x.json", "--plot", str(tmp_path / "x.svg"))
    assert errors(content["rows"]) == []
    assert {row["provider"] for row in content["rows"]} == {"kernel", "copy", "memopt", "eager"}
    assert (tmp_path / "x.svg").read_text().startswith("<svg")


def test_the_loss(tmp_path: Path) -> None:
    rows = dry(loss.main, tmp_path / "x.json")["rows"]
    assert errors(rows) == []
    assert all(row["peak_bytes"] > 0 for row in rows if "error" not in row)


@pytest.mark.parametrize(
    ("case", "providers"),
    [
        ("Llama, LoRA", (block_models.EAGER, block_models.MEMOPT, block_models.FOLDED)),
        ("ViT, full", (block_models.EAGER, block_models.MEMOPT)),
    ],
)
def test_blocks(case: str, providers: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block, "Worker", InThisProcess)
    monkeypatch.setattr(block, "PROVIDERS", providers)
    (found,) = dry(block.main, tmp_path / "x.json", "--case", case, "--plot", str(tmp_path / "x.svg"))["cases"]
    assert errors(found["rows"]) == []
    assert all(row["step_ms"] > 0 and row["peak_bytes"] > row["kept_bytes"] > 0 for row in found["rows"])


def test_peaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "_apart", prediction._measured)
    monkeypatch.setattr(
        peaks, "CASES", [each for each in peaks.CASES if each.model == "vit-large" or each.train == "lora"]
    )
    rows = dry(peaks.main, tmp_path / "x.json")["rows"]
    assert errors(rows) == []
    assert all(row["allocated"] > 0 for row in rows)


def test_tuning_goes_on_where_it_was_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    assert dry(tuning.main, path, "--minutes", "0")["rows"] == []
    rows = dry(tuning.main, path)["rows"]
    assert len(rows) == len(tuning.entries(dry_run=True))
    assert errors([one for row in rows for one in row["tried"]]) == []
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"rows": rows[:-1], "complete": False}))
    capsys.readouterr()
    assert len(dry(tuning.main, path)["rows"]) == len(rows)
    assert capsys.readouterr().err.startswith("1/1 ")


def test_sampled_linears(tmp_path: Path) -> None:
    (row,) = dry(sampled_kernels.main, tmp_path / "x.json")["rows"]
    assert row["exact_ms"] > 0


def test_tests_write_what_they_found_while_they_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tests, "_SECONDS_BETWEEN_WRITES", 0.0)
    monkeypatch.setattr(sys, "argv", ["pytest", "tests/gpu"])
    path = tmp_path / "x.json"
    results = gpu_tests.Results(path)

    def report(name: str, outcome: str, longrepr: Any = None) -> pytest.TestReport:
        return pytest.TestReport(name, ("x.py", 1, name), {}, outcome, longrepr, "call", duration=0.5)  # type: ignore[arg-type]

    crash = SimpleNamespace(reprcrash=SimpleNamespace(message="AssertionError: 3 is not 4\nassert 3 == 4"))
    results.pytest_runtest_logreport(report("a", "passed"))
    results.pytest_runtest_logreport(report("b", "failed", crash))
    results.pytest_runtest_logreport(report("c", "skipped", ("x.py", 1, "Skipped: needs two GPUs")))
    found = json.loads(path.read_text())
    assert found["complete"] is False
    assert found["counts"] == {"passed": 1, "failed": 1, "skipped": 1}
    assert found["failures"] == [{"test": "b", "when": "call", "message": "AssertionError: 3 is not 4"}]
    assert found["skips"] == {"needs two GPUs": 1}
    results.pytest_sessionfinish(1)
    assert json.loads(path.read_text())["complete"] is True
