"""The sums, losses and page of the zoo, on made-up rows; runs of real types are tests/zoo."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from benchmarks import coverage
from benchmarks.coverage_page import page
from memopt.patches.checkpointing.patch import BOTH
from tests.zoo.build import Row
from tests.zoo.config import default_config
from tests.zoo.coverage_sums import lost, rewrites, sums
from tests.zoo.libraries import LibraryModel
from tests.zoo.library_rows import LibraryRow, examine_library
from tests.zoo.losses import LossRow, loss_page, loss_sums
from tests.zoo.peaks import with_peaks


def row(name: str = "llama", **fields):
    counts = {"norm": {"fold": 4, "share": 1}, "activation": {"recompute": 2, "keep": 1}, "linear": {"keep": 9}}
    defaults = {
        "counts": counts,
        "block_bytes": (100, 50),
        "step_peak": (100, 40),
        "foldable_on_request": 1,
        "model_class": "Model",
    }
    return dataclasses.asdict(Row(name, **{**defaults, **fields}))


def held(rows) -> dict[str, bool]:
    return {result.name: result.holds for result in sums(rows)}


def test_sums_hold_where_every_promise_is_met() -> None:
    assert all(held([row(str(i), has_loss_head=i % 2 == 0) for i in range(700)]).values())


@pytest.mark.parametrize(
    ("spoilt", "promise"),
    [
        ({"status": "wrong"}, "disagree"),
        ({"unshared": 1}, "neither folded nor shared"),
        ({"unexplained": 1}, "without a reason"),
        ({"has_loss_head": True, "step_peak": (1, 400)}, "with a loss over a vocabulary"),
    ],
)
def test_one_bad_type_breaks_its_promise(spoilt, promise) -> None:
    results = held([*(row(str(i), has_loss_head=i % 2 == 0) for i in range(700)), row("bad", **spoilt)])
    assert [name for name, holds in results.items() if not holds] == [name for name in results if promise in name]


def test_too_few_types_norms_or_rewrites_are_short() -> None:
    few = held([row(status="not run", counts={}), row("b", counts={"activation": {"keep": 3}})])
    assert [holds for name, holds in few.items() if "run" in name or "folded, each" in name or "rewritten" in name] == [
        False, False, False,
    ]  # fmt: skip


def test_a_type_that_cannot_be_compared_runs_and_is_not_called_right() -> None:
    idle = row("idle", status="not compared", reason="shared: no gradients to compare (x)")
    texts = {result.name: result.text for result in sums([row(), idle])}
    assert next(text for name, text in texts.items() if "disagree" in name) == "0 of 1 compared"
    assert next(text for name, text in texts.items() if "built and run" in name).startswith("2 of 2")


def test_what_is_lost_is_named() -> None:
    worse = row(counts={"norm": {"fold": 3, "share": 2}})
    assert lost([row()], [row()]) == []
    assert "4 norms were folded, now 3" in lost([row()], [worse])[0]
    assert "ran before: no inputs" in lost([row()], [row(status="not run", reason="no inputs")])[0]
    assert "was compared before: noise" in lost([row()], [row(status="not compared", reason="noise")])[0]
    assert lost([row()], []) == []


def test_rewrites_are_what_is_not_kept() -> None:
    assert rewrites(row()) == 7


def test_peaks_replace_those_of_their_types_and_nothing_else() -> None:
    rows = [row("a", notes=["seen", "peak of a step not counted: then"]), row("b"), row("c"), row("d")]
    peaks = [
        dataclasses.asdict(Row("a", step_peak=(9, 3), has_loss_head=True)),
        dataclasses.asdict(Row("b", notes=["peak of a step not traced: now"])),
        dataclasses.asdict(Row("d", "not run", "it takes long")),
    ]
    merged = with_peaks(rows, peaks)
    assert merged[0] == {**rows[0], "step_peak": (9, 3), "has_loss_head": True, "notes": ["seen"]}
    assert merged[1] == {**rows[1], "step_peak": None, "notes": ["peak of a step not traced: now"]}
    assert merged[2] == rows[2]
    assert merged[3]["notes"] == ["peak of a step not traced: it takes long"]


def test_peaks_alone_are_traced_into_the_rows_of_a_file(tmp_path, monkeypatch) -> None:
    out = tmp_path / "coverage.json"
    kept = [row("bert", model_class="BertModel", step_peak=None), row("gone", status="no model", model_class="")]
    out.write_text(json.dumps({"rows": kept, "memory": True}))
    kept = json.loads(out.read_text())["rows"]
    monkeypatch.setattr(sys, "argv", ["coverage", "--peaks", "--out", str(out)])

    def in_this_process(types, jobs, examine, row):
        return (dataclasses.asdict(examine(name)) for name in types)

    monkeypatch.setattr(coverage, "examined", in_this_process)
    assert coverage.main() == coverage.EXIT_OK
    bert, gone = json.loads(out.read_text())["rows"]
    assert bert["step_peak"][1] < bert["step_peak"][0]
    assert {**bert, "step_peak": None} == kept[0]
    assert gone == kept[1]
    assert not list(tmp_path.glob("*.jsonl"))


def test_peaks_of_named_types_leave_those_of_others(tmp_path, monkeypatch, capsys) -> None:
    out = tmp_path / "coverage.json"
    kept = [row(name, model_class="Model", step_peak=[9, 8]) for name in ("bert", "llama")]
    out.write_text(json.dumps({"rows": kept, "memory": True}))
    found = dataclasses.asdict(Row("bert", step_peak=(9, 3)))
    monkeypatch.setattr(coverage, "examined", lambda types, *_: [found for name in types if name == "bert"])
    monkeypatch.setattr(sys, "argv", ["coverage", "--peaks", "bert", "--out", str(out)])
    assert coverage.main() == coverage.EXIT_OK
    assert [each["step_peak"] for each in json.loads(out.read_text())["rows"]] == [[9, 3], [9, 8]]
    monkeypatch.setattr(sys, "argv", ["coverage", "--peaks", "gpt2", "--out", str(out)])
    assert coverage.main() == coverage.EXIT_CANNOT_RUN
    assert "'gpt2'" in capsys.readouterr().err


def test_the_page_shows_every_type_and_reason() -> None:
    reasons = {"norm": {"not folded: lm_head.weight is tied to model.embed_tokens.weight": 1}}
    rows = [row(reasons=reasons), row("bark", status="no model"), row("dinat", status="not built", reason="a|b")]
    text = page({"versions": {"python": "3", "torch": "2", "transformers": "5"}, "rows": rows})
    assert "| llama | Model | 4+1 / 0 / 0 of 5 |" in text
    assert "| dinat | a\\|b |" in text
    assert "| … is tied to … | 1 | 1 |" in text
    assert "own: bark." in text


def run(*arguments: str, monkeypatch) -> int:
    monkeypatch.setattr(sys, "argv", ["coverage", *arguments])
    return coverage.main()


def test_check_recomputes_and_exits_1_where_it_is_short(tmp_path: Path, monkeypatch, capsys) -> None:
    file = tmp_path / "coverage.json"
    file.write_text(json.dumps({"versions": {}, "rows": [row()]}))
    assert run("--check", "--out", str(file), monkeypatch=monkeypatch) == 1
    assert "SHORT model types built and run: 1 of 1" in capsys.readouterr().out
    file.write_text(json.dumps({"versions": {}, "rows": [row(str(i), has_loss_head=i % 2 == 0) for i in range(700)]}))
    assert run("--check", "--out", str(file), monkeypatch=monkeypatch) == 0


@pytest.mark.parametrize("content", [None, "{", "[]", '{"rows": [{}]}'])
def test_a_file_that_cannot_be_used_is_one_sentence(content, tmp_path: Path, monkeypatch, capsys) -> None:
    file = tmp_path / "coverage.json"
    if content is not None:
        file.write_text(content)
    assert run("--check", "--out", str(file), monkeypatch=monkeypatch) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_an_unknown_type_is_one_sentence(monkeypatch, capsys) -> None:
    assert run("lama", monkeypatch=monkeypatch) == 2
    assert "no model type 'lama'" in capsys.readouterr().err


def test_an_interrupted_run_goes_on_with_the_rows_that_are_whole(tmp_path: Path) -> None:
    partial, header = tmp_path / "x.partial.jsonl", {"versions": {"torch": "2"}}
    partial.write_text(json.dumps(header) + "\n" + json.dumps(row()) + "\n" + '{"model_type": "be')
    assert [each["model_type"] for each in coverage._resumed(partial, header)] == ["llama"]
    assert coverage._resumed(partial, {"versions": {"torch": "3"}}) == []
    assert not partial.exists()


def test_a_run_that_was_interrupted_before_its_first_row_goes_on(tmp_path: Path, monkeypatch) -> None:
    out, header = tmp_path / "ways.json", {"versions": coverage.versions()}
    partial = out.with_suffix(".partial.jsonl")
    partial.write_text(json.dumps(header) + "\n")
    written = []

    def found(types, *_):
        yield row("bert")
        written.extend(map(json.loads, partial.read_text().splitlines()))

    monkeypatch.setattr(coverage, "examined", found)
    assert run("--ways", "bert", "--out", str(out), monkeypatch=monkeypatch) == 0
    assert [each.get("model_type") for each in written] == [None, "bert"]


def losses(*rows: LossRow) -> list[dict]:
    fused = [LossRow(str(i), "fused", bf16=1.0) for i in range(97)]
    return [dataclasses.asdict(each) for each in (*fused, LossRow("ctc", "left", "its loss|other"), *rows)]


@pytest.mark.parametrize(
    ("spoilt", "promise"),
    [
        ((), None),
        ((LossRow("a", "wrong", "differs"),), "not the stock"),
        (tuple(LossRow(each, "whole", "read") for each in "abcd"), "never whole"),
        ((LossRow("a", "fused", bf16=1.3),), "bf16"),
    ],
)
def test_promises_of_losses_are_broken_one_by_one(spoilt, promise) -> None:
    rows = losses(*spoilt)
    assert [each.name for each in loss_sums(rows) if not each.holds] == [
        each.name for each in loss_sums(rows) if promise and promise in each.name
    ]
    page = loss_page({"rows": rows})
    assert "| its loss\\|other | ctc |" in page
    assert all(f"| {each.reason} |" in page for each in spoilt if each.reason)


def test_ways_of_named_types_replace_their_rows_and_a_wrong_one_is_short(tmp_path, monkeypatch, capsys) -> None:
    out = tmp_path / "ways.json"
    counts = {"checkpointing": {BOTH: 2}, "tile": {"tiles": 1}}
    rows = {name: row(name, counts=counts) for name in ("bert", "llama")}
    rows["vit"] = row("vit", status="not run", reason="no inputs")
    out.write_text(json.dumps({"versions": coverage.versions(), "rows": list(rows.values())}))
    assert not rows.keys() & coverage._missing(list(rows.values()))
    assert run("--ways", "--check", "--out", str(out), monkeypatch=monkeypatch) == 0
    assert "types whose plan has tiles of tokens: 2 of 2" in capsys.readouterr().out
    rows["bert"] = row("bert", status="wrong", reason="gradients differ", counts=counts)
    monkeypatch.setattr(coverage, "examined", lambda types, *_: [rows[name] for name in types])
    assert run("--ways", "bert", "--out", str(out), monkeypatch=monkeypatch) == 1
    printed = capsys.readouterr().out
    assert "SHORT steps that are not the stock model's: bert of 2" in printed
    assert "not run: no inputs: vit" in printed
    statuses = {each["model_type"]: each["status"] for each in json.loads(out.read_text())["rows"]}
    assert statuses == {"bert": "wrong", "llama": "ok", "vit": "not run"}
    assert not list(tmp_path.glob("*.md"))


def test_losses_are_checked_from_their_own_file(tmp_path: Path, monkeypatch, capsys) -> None:
    file = tmp_path / "losses.json"
    file.write_text(json.dumps({"versions": {}, "rows": losses()}))
    assert run("--losses", "--check", "--out", str(file), monkeypatch=monkeypatch) == 0
    assert run("--check", "--out", str(file), monkeypatch=monkeypatch) == 2
    assert "97 of 97 (100.0 %)" in capsys.readouterr().out


def test_rows_of_libraries_join_those_of_types_and_outlive_a_missing_library(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "coverage.json"
    versions = {"transformers": "5", "torch": "2", "python": "3"}
    file.write_text(json.dumps({"versions": versions, "rows": [row()]}))

    def found(status: str, saved: tuple[int, int] | None) -> list[dict]:
        return [dataclasses.asdict(LibraryRow("timm", "vit", status, "why", "1.0", "5 of 5 norms", saved, 1e-16))]

    monkeypatch.setattr(coverage, "library_rows", lambda names: found("ok", (2048, 1024)))
    assert run("--libraries", "--out", str(file), monkeypatch=monkeypatch) == 0
    monkeypatch.setattr(coverage, "library_rows", lambda names: found("skipped", None))
    assert run("--libraries", "--out", str(file), monkeypatch=monkeypatch) == 0
    page = file.with_suffix(".md").read_text()
    assert "| timm 1.0 | vit | 5 of 5 norms | 2 -> 1 | -50 % | yes |" in page
    assert "## The families that are fine-tuned most" in page
    assert [each["model_type"] for each in json.loads(file.read_text())["rows"]] == ["llama"]
    monkeypatch.setattr(coverage, "library_rows", lambda names: found("wrong", (2048, 1024)))
    assert run("--libraries", "--out", str(file), monkeypatch=monkeypatch) == 1


def test_a_library_that_is_missing_is_skipped_by_name() -> None:
    missing = LibraryModel("no_such_library", "x", lambda: None, dict)
    assert examine_library(missing).reason == "no_such_library is not installed"


def test_parts_of_a_model_type_get_defaults() -> None:
    assert default_config("encoder-decoder").decoder.model_type
