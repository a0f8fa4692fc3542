"""The benchmarks of sampled linears judge as they say; the slow ones are not run here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import finetune_sampled, finetune_task, sampled_kernels
from benchmarks.comparison import summarize
from benchmarks.finetune_task import BATCH, INDEX, Example, Task
from benchmarks.sampled_bytes import COLUMNS, Line, Tail, linear_inputs, shortfalls
from benchmarks.training import Run
from benchmarks.ways import AGAIN, STOCK


def line(what: str, **units: float) -> Line:
    return Line(what, tuple(units.get(column.replace(", ", "_").replace(" ", "_"), 0.0) for column in COLUMNS))


INPUTS = [line("linear input: wo", full=4.0), line("sampled rows", full_linears_only=1.2)]


def test_inputs_of_linears_are_whole_ones_and_rows() -> None:
    lines = [*INPUTS, line("norm output (x_hat): layer_norm", full=9.0)]
    assert linear_inputs(lines, "full") == 4.0
    assert linear_inputs(lines, "full, linears only") == 1.2


def test_a_tail_that_is_too_long_and_a_ratio_that_is_too_small_fall_short() -> None:
    good = [Tail("ViT", "stock", 16.0, 8.0), Tail("ViT", "sampled", 7.8, 1.8)]
    assert shortfalls(good, INPUTS) == []
    assert len(shortfalls([Tail("ViT", "sampled", 7.9, 1.81)], INPUTS)) == 1
    assert len(shortfalls(good, [INPUTS[0], line("sampled rows", full_linears_only=2.0)])) == 1


def test_epochs_see_each_sentence_once_and_number_it() -> None:
    task = Task(tuple(Example([1, *range(i % 7), 2], i % 2) for i in range(40)), ())
    batches = finetune_task.epochs_of(task, 2, seed=0)
    numbers = torch.cat([batch[INDEX] for batch in batches]).tolist()
    assert sorted(numbers[:40]) == sorted(numbers[40:]) == list(range(40))
    assert numbers[:40] != numbers[40:]
    batch = batches[0]
    lengths = [len(task.train[number].ids) for number in batch[INDEX].tolist()]
    assert batch["attention_mask"].sum(1).tolist() == lengths


def test_parts_of_a_batch_make_the_batch() -> None:
    batch = {"input_ids": torch.arange(BATCH), INDEX: torch.arange(BATCH)}
    parts = [finetune_sampled._part(batch, start, 6) for start in range(0, BATCH, 6)]
    assert torch.cat([part["input_ids"] for part in parts]).tolist() == list(range(BATCH))
    assert INDEX not in parts[0]
    assert INDEX in finetune_sampled._part(batch, 0, 6, indexed=True)


def test_only_the_recipes_own_sampler_and_the_exact_alternative_are_judged() -> None:
    def runs(variant: str, difference: float) -> list[Run]:
        return [Run(variant, seed, 0.8 + difference, 0.5, 0.1, 100, 1.0) for seed in range(2)]

    names = [STOCK, AGAIN, *(variant.name for variant in finetune_sampled.VARIANTS), finetune_sampled.ACCUMULATED]
    rows = summarize([run for name in names for run in runs(name, 0.0)])
    judged = [row.way for row in rows if finetune_sampled._is_judged(row)]
    assert judged == ["systematic 0.3", "accumulated"]


def test_variants_are_recipes() -> None:
    from memopt.plan.recipe import load_recipe

    for variant in finetune_sampled.VARIANTS:
        for every in (False, True):
            rules = load_recipe("sampled", variant.changes(every))
            assert (rules.linears.method, rules.linears.budget) == (variant.method, variant.budget)


def test_the_gpu_benchmark_runs_through_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sampled_kernels.main(["--dry-run", "--json", str(tmp_path / "x.json")]) == 0
    assert "numbers mean nothing" in capsys.readouterr().out
    (row,) = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert row["ratios"]["all"] == pytest.approx(sum(row["ratios"][step] for step in sampled_kernels.STEPS))
    if not torch.cuda.is_available():
        assert sampled_kernels.main([]) == 2
