"""Predictions beside published peaks: the rows say where they are from, and the docs quote what was found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import published_peaks
from benchmarks.published_peaks import Peak, runs, short, summary_rows

ROOT = Path(__file__).parents[2]
FOUND = json.loads((ROOT / "benchmarks" / "results" / "published_peaks.json").read_text())["rows"]


def peaks() -> list[Peak]:
    return [Peak(**{key: value for key, value in row.items() if key != "error"}) for row in FOUND]


def test_every_run_has_a_source_and_a_third_is_held_back() -> None:
    every = runs()
    assert len(every) >= 30
    assert all(run.source["url"].startswith("https://") and run.source["how"] for run in every)
    assert all(run.row["software"] in run.source["software"] for run in every)
    assert sum(run.row["held_back"] for run in every) >= len(every) / 3
    assert len({run.name for run in every}) == len(every)


def test_the_results_are_of_these_runs_and_pass() -> None:
    assert list(dict.fromkeys(row["run"] for row in FOUND)) == [run.name for run in runs()]
    assert short(peaks()) == []


def test_the_check_catches_a_row_and_a_mean_that_are_off() -> None:
    first, *others = peaks()
    assert "off by +13.0%" in short([replace(first, predicted=first.published * 1.13), *others])[0]
    assert short([replace(first, predicted=first.published * 1.13, why="a reason"), *others]) == []
    assert "mean error of allocated is 6.0%" in short([replace(first, predicted=first.published * 1.06)])[0]


def test_the_docs_quote_what_was_found() -> None:
    lines = ["| measure | rows | runs | mean error | largest |", "|---|---|---:|---:|---:|"]
    lines += [f"| {' | '.join(row)} |" for row in summary_rows(peaks())]
    page = (ROOT / "docs" / "fit.md").read_text()
    assert "\n".join(lines) in page
    allocated = [row for row in summary_rows(peaks()) if row[0] == "allocated"]
    assert (
        f"within {max(abs(each.error) for each in peaks() if each.measure == 'allocated'):.1%}".replace("%", " %")
        in (ROOT / "README.md").read_text()
    )
    assert len(allocated) == 2


@pytest.mark.parametrize(
    "words",
    ["SmolLM2-135M qlora 2 x 512, eager", "SmolLM2-135M lora 1 x 4096, sdpa", "bert 1 x 512, fp16-mixed, adamw8bit"],
)
@pytest.mark.rotates(3)
def test_a_prediction_is_what_the_results_say(words: str) -> None:
    run = next(run for run in runs() if all(word in run.name for word in words.split()))
    for peak in run.peaks():
        known = next(each for each in peaks() if (each.run, each.measure) == (peak.run, peak.measure))
        assert peak.predicted == pytest.approx(known.predicted, rel=1e-3)


def test_words_that_no_row_has_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        published_peaks.main(["--only", "nothing"])
    assert "no row has all of 'nothing'" in capsys.readouterr().err
