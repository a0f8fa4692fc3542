"""What `benchmarks.finetune` trains and predicts: presets build, a seed gives the same run, a wrong way is seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import convergence, finetune
from benchmarks.comparison import shortfalls, summarize
from benchmarks.convergence import Shape, texts
from benchmarks.presets import PRESETS
from benchmarks.published import Point, predict
from benchmarks.settings import PAPERS
from benchmarks.training import Setting, train
from benchmarks.ways import AGAIN, CHECKPOINTING, STOCK, prepare
from memopt.trace.training import Training
from tests.factories import tiny_config

TINY = Shape(layers=1, hidden=16, heads=2, batch=2, seq=16)


@pytest.fixture(scope="module")
def setting() -> Setting:
    return convergence.setting(TINY, 3)


def test_a_seed_gives_the_same_run_and_memopt_keeps_fewer_bytes(setting: Setting) -> None:
    stock, again, patched = (train(setting, way, 0) for way in (STOCK, STOCK, "exact-unfolded"))
    assert stock.curve == again.curve
    assert patched.loss == pytest.approx(stock.loss, rel=1e-5)
    assert 0 < patched.kept < stock.kept <= stock.peak
    assert [step for step, _ in stock.curve] == [0, 1, 2, 3]
    assert train(setting, STOCK, 1).loss != stock.loss


def test_a_way_whose_gradient_is_wrong_falls_short(setting: Setting) -> None:
    def wrong(way: str, model: nn.Module, seed: int) -> Callable[..., Any]:
        run = prepare(way, model, seed)
        if way == CHECKPOINTING:
            model.model.norm.weight.register_hook(lambda gradient: 1.001 * gradient)  # type: ignore[union-attr]
        return run

    runs = [train(setting, way, seed, wrong) for way in (STOCK, AGAIN, CHECKPOINTING) for seed in (0, 1)]
    assert any("checkpointing: gradient off by" in line for line in shortfalls(summarize(runs)))
    right = [train(setting, CHECKPOINTING, seed) for seed in (0, 1)]
    assert shortfalls(summarize([*runs[:4], *right])) == []


@pytest.mark.slow
def test_the_command_trains_each_way_in_a_process_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "ways.json"
    asked = ["--preset", "mesa", "--ways", "exact-unfolded", "checkpointing", "liger", "--steps", "4", "--check"]
    assert finetune.main([*asked, "--json", str(file)]) == 0
    content = json.loads(file.read_text())
    assert [row["way"] for row in content["rows"]] == [STOCK, AGAIN, "exact-unfolded", CHECKPOINTING]
    assert list(content["cannot_run"]) == ["liger"]
    assert all(row["passed"] for row in content["rows"])
    assert content["rows"][2]["kept"] < 1


def test_no_topic_is_learnt_and_held_out() -> None:
    learnt, held = ({bytes(row.tolist()) for row in rows} for rows in texts(64, "cpu"))
    assert len(learnt) > 8 * len(held) > 0
    assert 20 * len(learnt & held) < len(held)  # lines of a table, and the like


@pytest.mark.parametrize("name", [name for name, paper in PAPERS.items() if not paper.quantised])
def test_the_small_model_of_a_paper_learns_from_its_batch(name: str) -> None:
    setting = replace(PAPERS[name], batch=2, seq=16).setting("cpu", 3)
    model = setting.model(0)
    loss = model(**setting.batches(0)[0]).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert any(each.grad is not None for each in model.parameters())
    trained = sum(each.requires_grad for each in model.parameters())
    assert (trained < len(list(model.parameters()))) == (PAPERS[name].training.train != "full")


@pytest.mark.parametrize("name", PAPERS)
def test_a_papers_preset_has_its_structure_at_both_sizes_and_names_its_source(name: str) -> None:
    paper = PAPERS[name]
    small, whole = (paper.config(size) for size in ("cpu", "paper"))  # type: ignore[arg-type]
    assert type(small) is type(whole)
    assert small.hidden_size < whole.hidden_size
    assert "arXiv" in paper.source
    assert PRESETS[name].paper is paper
    assert any(point.published is not None for point in paper.points) or "no figure" in paper.source


def test_a_point_is_compared_with_the_one_that_it_names() -> None:
    points = (
        Point(of="activations"),
        Point("stock", 1.0, "twice, ", of="activations", training={"batch": 4}),
        Point(CHECKPOINTING, of="activations", against=1, training={"batch": 4}),
    )
    stock, twice, checkpointed = predict(tiny_config("llama"), Training(2, 16, "fp32"), points, None)
    assert stock.change == 0
    assert twice.name == "twice, stock"
    assert twice.change == pytest.approx(1, abs=0.05)
    assert checkpointed.change == checkpointed.activations / twice.activations - 1 < 0
