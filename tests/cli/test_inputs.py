"""`--inputs`: a model whose inputs nobody can guess, through every command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from memopt import load, plan_for
from memopt.patches.apply import is_patched
from tests.cli.conftest import Run
from tests.stations import save_stations, stations_batch

Memopt = Callable[..., Run]


@pytest.fixture
def stations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's folder, in an empty current folder beside batch.pt."""
    monkeypatch.chdir(tmp_path)
    return save_stations(tmp_path)[0]


def test_patch_folds_with_a_batch_and_remembers_its_form(memopt: Memopt, stations: Path) -> None:
    run = memopt("patch", stations, "--inputs", "batch.pt", "--json")
    assert run.code == 0, run.err
    assert json.loads(run.out)["counts"]["norm"] == {"fold": 2}
    inputs = json.loads(Path("stations-memopt/memopt.json").read_text())["inputs"]
    assert inputs["file"] == "batch.pt"
    assert inputs["arguments"]["labels"] == {"dtype": "int64", "shape": [2]}


def test_without_a_batch_the_error_says_how_to_make_one(memopt: Memopt, stations: Path) -> None:
    run = memopt("patch", stations, "--dry-run", "--json")
    assert "fold" not in json.loads(run.out)["counts"]["norm"]
    assert any("torch.save(dict(processor(" in note for note in json.loads(run.out)["notes"])
    run = memopt("report", stations)
    assert run.code == 2
    assert "--inputs batch.pt" in run.err


def test_verify_runs_with_the_batch_and_names_it_when_it_is_missing(memopt: Memopt, stations: Path) -> None:
    memopt("patch", stations, "--inputs", "batch.pt", "--out", "out")
    run = memopt("verify", "out", "--inputs", "batch.pt", "--json")
    assert run.code == 0, run.err
    assert json.loads(run.out)["status"] == "pass"
    run = memopt("verify", "out", "--level", "forward", "--json")
    assert run.code == 3
    (skipped,) = json.loads(run.out)["checks"]
    assert "patched with --inputs batch.pt. Pass --inputs batch.pt." in skipped["detail"]


def test_report_has_the_size_of_the_batch_and_a_patched_folder_remembers_it(memopt: Memopt, stations: Path) -> None:
    document = json.loads(memopt("report", stations, "--inputs", "batch.pt", "--json").out)
    assert (document["training"]["batch"], document["training"]["seq"]) == (2, None)
    assert document["inputs"]["labels"]["shape"] == [2]
    assert document["summary"]["after"] < 0.6 * document["summary"]["before"]
    memopt("patch", stations, "--inputs", "batch.pt", "--out", "out")
    again = json.loads(memopt("report", "out", "--json").out)
    assert again["before"] == document["before"]


@pytest.mark.parametrize("option", ["--batch", "--seq"])
def test_a_batch_and_a_size_are_a_usage_error(memopt: Memopt, stations: Path, option: str) -> None:
    run = memopt("report", stations, "--inputs", "batch.pt", option, 4)
    assert (run.code, run.out) == (2, "")
    assert f"--inputs and {option} cannot go together" in run.err


def test_a_size_that_cannot_be_guessed_points_to_the_batch(memopt: Memopt, stations: Path) -> None:
    memopt("patch", stations, "--inputs", "batch.pt", "--out", "out")
    run = memopt("report", "out", "--batch", 2)
    assert run.code == 2
    assert "pass --inputs batch.pt" in run.err


@pytest.mark.parametrize("command", ["patch", "verify", "report"])
@pytest.mark.parametrize("bad", ["missing", "pickle", "unknown argument", "wrong shape"])
def test_a_bad_batch_is_one_line_and_code_2(memopt: Memopt, stations: Path, command: str, bad: str) -> None:
    batch = stations_batch()
    if bad == "pickle":
        Path("bad.pt").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    elif bad == "unknown argument":
        torch.save({**batch, "label": batch["labels"]}, "bad.pt")
    elif bad == "wrong shape":
        batch["weather_by_station"]["readings"] = torch.ones(2, 12, 4)
        torch.save(batch, "bad.pt")
    if command == "verify":
        memopt("patch", stations, "--inputs", "batch.pt", "--out", "out")
    run = memopt(command, "out" if command == "verify" else stations, "--inputs", "bad.pt", "--json")
    document = json.loads(run.out)
    assert (run.code, document["status"]) == (2, "error")
    assert document["error"]["type"] == ("ModelError" if (command, bad) == ("report", "wrong shape") else "InputsError")
    assert run.err.splitlines()[-1].startswith("error: ")


def test_load_and_plan_take_the_file_and_load_remembers_its_form(memopt: Memopt, stations: Path) -> None:
    memopt("patch", stations, "--inputs", "batch.pt", "--out", "out")
    for model in (load("out"), load("out", inputs="batch.pt")):
        assert is_patched(model)
        model(**stations_batch()).loss.backward()
    assert len(plan_for(stations, "exact", inputs="batch.pt").folds()) == 2


def test_a_pattern_that_matches_nothing_is_noted(memopt: Memopt, llama: Path) -> None:
    run = memopt("patch", llama, "--dry-run", "--set", "ignore=[no_such_norm]", "--json")
    assert any("ignore 'no_such_norm' matches no norm" in note for note in json.loads(run.out)["notes"])


def test_a_report_with_equal_columns_says_why(memopt: Memopt, llama: Path) -> None:
    Path("none.yaml").write_text(
        "name: none\nnorms: {method: none}\nactivations: {method: none}\ngated_mlps: {method: none}\n"
    )
    document = json.loads(memopt("report", llama, "--recipe", "none.yaml", "--seq", 8, "--json").out)
    assert document["summary"]["change"] == 0
    assert any("Both columns are equal" in note and "does not patch norms" in note for note in document["notes"])


def test_a_remembered_form_that_does_not_run_is_replaced_by_a_guess_with_a_note(memopt: Memopt, llama: Path) -> None:
    ids = torch.arange(4, 20).reshape(2, 8)
    torch.save({"input_ids": ids}, "ids.pt")
    assert memopt("patch", llama, "--inputs", "ids.pt", "--out", "out", "--recipe", "exact-unfolded").code == 0
    assert json.loads(memopt("report", "out", "--json").out)["training"]["seq"] == 8
    manifest = json.loads(Path("out/memopt.json").read_text())
    manifest["inputs"]["arguments"]["input_ids"]["shape"] = [2, 8, 8]
    Path("out/memopt.json").write_text(json.dumps(manifest))
    document = json.loads(memopt("report", "out", "--json").out)
    assert document["training"]["seq"] == 128
    assert "guessed" in document["notes"][0]
