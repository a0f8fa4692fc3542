"""`memopt report --budget` and `--frontier`, from the command line to the text, the JSON document and the recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memopt.cli.main import main
from memopt.plan.recipe import load_recipe
from memopt.prediction.planner import training
from memopt.prediction.planner.choice import Choice, Frontier, Plan, budget_name, in_words
from memopt.prediction.setup import CUBLAS_WORKSPACE_HOPPER
from memopt.trace.training import Request
from tests.factories import tiny_config
from tests.trace.builders import named_config

GIB = 1 << 30
RECIPE = load_recipe("exact-unfolded", ("checkpointing.method=full", "checkpointing.blocks=[model.layers.0]"))
PLAN = Plan(RECIPE, "1 block as in 'exact-unfolded', 1 checkpointed", 1, 1, 20 * GIB, 0.5, 0.25)
SPLIT = Plan(RECIPE, "2 blocks checkpointed", 2, 4, 19 * GIB, 0.6, 0.5, traced=False)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the planner was asked; it answers with a plan and another one, or with a frontier of one point."""
    found: dict[str, Any] = {}

    def plan_training(request: Request, budget: str | None, **options: Any) -> Choice | Frontier:
        model = str(request.model)
        found.update(options, request=request, budget=budget)
        if budget is None:
            return Frontier(model, "batch 1", "RTX 4090", (PLAN,))
        return Choice(model, "batch 1", "RTX 4090", 24 * GIB, PLAN, (SPLIT,), margin=GIB // 2)

    monkeypatch.setattr(training, "plan_training", plan_training)
    return found


def test_the_plan_and_the_next_ones_are_printed(asked: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "MODEL", "--budget", "24GiB", "--seq", "4096", "--train", "lora"]) == 0
    assert capsys.readouterr().out.splitlines()[:4] == [
        "MODEL: batch 1",
        "Budget 24.00 GiB: fits, 3.50 GiB to spare beside a margin of 0.50 GiB.",
        "Plan: 1 block as in 'exact-unfolded', 1 checkpointed: 20.00 GiB, +25.0% time",
        "Next: 2 blocks checkpointed; 4 micro-batches of 2: about 19.00 GiB, +50.0% time",
    ]
    assert (asked["budget"], asked["card"]) == ("24GiB", None)
    assert asked["request"] == Request("MODEL", seq=4096, train="lora")


def test_a_card_beside_a_budget_gives_the_rates(asked: dict[str, Any]) -> None:
    assert main(["report", "MODEL", "--budget", "20GiB", "--gpu", "rtx4090", "--set", "dropouts.method=seed"]) == 0
    assert (asked["budget"], asked["card"]) == ("20GiB", "rtx4090")
    assert asked["request"] == Request("MODEL", overrides=("dropouts.method=seed",))


def test_out_writes_a_recipe_that_can_be_used(asked: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    assert main(["report", "MODEL", "--budget", "24GiB", "--out", str(file)]) == 0
    assert load_recipe(file) == RECIPE


def test_json_is_one_document(asked: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "MODEL", "--budget", "24GiB", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert (plan["budget_bytes"], plan["plan"]["total_bytes"], plan["others"][0]["traced"]) == (
        24 * GIB,
        20 * GIB,
        False,
    )


def test_a_frontier_has_a_line_a_point(asked: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "MODEL", "--frontier", "--budget", "rtx4090"]) == 0
    assert "   20.00  +25.0%  1 block as in" in capsys.readouterr().out
    assert (asked["budget"], asked["card"]) == (None, "rtx4090")
    assert main(["report", "MODEL", "--frontier", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["frontier"]["points"][0]["exact"] is True


@pytest.mark.parametrize(
    "options", [["--out", "x.yaml"], ["--allow", "approximate"], ["--frontier", "--out", "x.yaml"]]
)
def test_options_of_a_plan_need_a_budget(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "MODEL", *options]) == 2
    assert "--out and --allow need the plan of --budget" in capsys.readouterr().err


def test_the_page_shows_the_plan_and_a_note_names_keys_of_set_that_the_plan_changes(
    asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    named_config("llama").save_pretrained(tmp_path)
    drawn: list[Any] = []
    monkeypatch.setattr("memopt.cli.outputs.draw", lambda comparison, *_, **__: drawn.append(comparison))
    line = ["--budget", "24GiB", "--seq", "16", "--set", "checkpointing.method=none", "--set", "norms.fold=none"]
    assert main(["report", str(tmp_path), *line, "--html", str(tmp_path / "page.html")]) == 0
    assert [each.step.recipe for each in drawn] == [RECIPE]
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: the plan")]
    assert notes == ["note: the plan has checkpointing.method=full, in place of none from --set."]


def test_a_frontier_is_of_one_card(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "MODEL", "--frontier", "--budget", "24GiB", "--gpu", "h100"]) == 2
    assert "--gpu and --budget both name one. Leave out --budget." in capsys.readouterr().err


def test_what_does_not_fit_is_a_no(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_config("llama")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    assert main(["report", str(tmp_path), "--budget", "100MiB", "--seq", "32", "--json"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["type"] == "NegativeVerdict"
    assert "fits in 100 MiB: the smallest found takes" in error["message"]


def test_a_frontier_is_not_cut_at_a_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "MODEL", "--frontier", "--budget", "8GiB"]) == 2
    assert "so a size in --budget has no effect. Leave out one of them" in capsys.readouterr().err


@pytest.mark.parametrize("options", [("--budget", "24GiB"), ("--frontier",)])
def test_notes_are_of_the_model_and_of_what_in_the_recipe_has_no_effect(
    options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_config("vit").save_pretrained(tmp_path)
    line = ["report", str(tmp_path), *options, "--seq", "16", "--set", "targets=[nowhere.*]"]
    said = (
        "The model reads no tokens, so --seq has no effect.",
        "Recipe 'exact-unfolded': targets 'nowhere.*' matches no norm, linear or other place of this model.",
    )
    assert main(line) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == list(said)
    assert main([*line, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert tuple((found.get("plan") or found["frontier"])["notes"]) == said


@pytest.mark.parametrize(
    ("option", "shown"), [(("--frontier",), "Memory against time"), (("--budget", "24GiB"), "fits")]
)
def test_a_plan_and_a_frontier_can_be_drawn(
    asked: dict[str, Any], option: tuple[str, ...], shown: str, tmp_path: Path
) -> None:
    named_config("llama").save_pretrained(tmp_path)
    file = tmp_path / "page.html"
    assert main(["report", str(tmp_path), "--seq", "16", *option, "--html", str(file)]) == 0
    text = file.read_text()
    assert shown in text.replace("\n", " ")
    assert PLAN.words.replace("'", "&#39;") in text


@pytest.mark.parametrize("option", [("--lora-rank", "8"), ("--lora-targets", "q,v"), ("--lora-dropout", "0.1")])
def test_options_of_lora_need_lora(option: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "MODEL", *option]) == 2
    assert f"error: {option[0]} needs LoRA, and --train is full. Add --train lora" in capsys.readouterr().err


def test_a_recipe_that_is_there_is_replaced_only_with_force(
    asked: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text("mine")
    arguments = ["report", "MODEL", "--budget", "24GiB", "--out", str(file)]
    assert main(arguments) == 2
    assert f"--out '{file}' exists already. Choose another name, or replace it with --force." in capsys.readouterr().err
    assert (asked, file.read_text()) == ({}, "mine")
    assert main([*arguments, "--force"]) == 0
    assert file.read_text() != "mine"


def test_a_budget_that_is_none_is_refused_before_the_model_is_looked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "MODEL", "--budget", "0"]) == 2
    assert "error: '0' has no unit." in capsys.readouterr().err


def test_a_plan_and_its_drawings_have_the_workspaces_of_the_card(asked: dict[str, Any]) -> None:
    assert main(["report", "MODEL", "--budget", "h100"]) == 0
    assert asked["setup"].workspace == CUBLAS_WORKSPACE_HOPPER


@pytest.mark.parametrize(
    ("nbytes", "budget", "said"),
    [
        (1500 << 20, None, "1500 MiB"),
        (GIB, None, "1.00 GiB"),
        (9 << 19, None, "4.5 MiB"),
        (9 << 29, None, "4.50 GiB"),
        (600 << 20, 24 * GIB, "0.59 GiB"),
        (5 * GIB, 1500 << 20, "5120 MiB"),
    ],
)
def test_a_small_budget_is_printed_in_mib(nbytes: int, budget: int | None, said: str) -> None:
    assert in_words(nbytes, budget) == said
    assert budget_name(1500 << 20) == "budget-1500MiB"
