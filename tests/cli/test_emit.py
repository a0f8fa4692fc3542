"""`--emit`: configuration files of training engines beside a patched checkpoint, and beside a plan."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml

import memopt as memopt_api
from memopt.cli.main import main
from memopt.emit import check_kinds
from memopt.plan.recipe import load_recipe
from memopt.prediction.planner import training
from memopt.prediction.planner.choice import Choice, Plan
from memopt.trace.training import Training
from memopt.verification.weights import verify_weights
from tests.cli.conftest import Run

Memopt = Callable[..., Run]
OUT = Path("tiny-llama-memopt")


def failed(folder: Path) -> dict[str, str]:
    return {check.id: check.detail for check in verify_weights(folder) if check.status == "fail"}


def test_patch_adds_files_that_verify_accepts_and_unpatch_leaves_out(
    memopt: Memopt, llama: Path, tmp_path: Path
) -> None:
    engines = ("--emit", "axolotl", "--emit", "deepspeed")
    run = memopt("patch", llama, *engines, "--dry-run")
    assert "and beside them axolotl.yaml, deepspeed.json, recipe.yaml" in run.out
    run = memopt("patch", llama, *engines)
    assert run.code == 0, run.err
    assert "the batch, accumulation and bf16 or fp16 of deepspeed.json" in run.err
    assert "Beside them: axolotl.yaml, deepspeed.json, recipe.yaml." in run.out
    assert json.loads((OUT / "memopt.json").read_text())["emitted"] == ["axolotl.yaml", "deepspeed.json", "recipe.yaml"]
    assert yaml.safe_load((OUT / "axolotl.yaml").read_text())["base_model"] == str(OUT)
    model = transformers.AutoModelForCausalLM.from_pretrained(OUT)
    memopt_api.patch(model, OUT / "recipe.yaml")  # as axolotl's plugin does: the norms are folded by then
    assert memopt_api.summary(model).modules
    assert failed(OUT) == {}
    assert memopt("unpatch", OUT, "--out", tmp_path / "stock").code == 0
    assert {path.name for path in (tmp_path / "stock").iterdir()} == {path.name for path in llama.iterdir()}
    with (OUT / "axolotl.yaml").open("a") as file:
        file.write("micro_batch_size: 8\n")
    assert failed(OUT) == {}  # as docs tell users to: it is the same model
    warned = {check.id: check.detail for check in verify_weights(OUT) if check.status == "warn"}
    assert warned == {"weights.files": "axolotl.yaml was changed"}
    assert memopt("patch", llama, "--force").code == 2  # what a user edited is not replaced
    with (OUT / "generation_config.json").open("a") as file:
        file.write("\n")
    assert "axolotl.yaml was changed; generation_config.json was changed" in failed(OUT)["weights.files"]


def test_a_file_that_is_added_cannot_pass_as_emitted(memopt: Memopt, llama: Path) -> None:
    assert memopt("patch", llama, "--emit", "trainer").code == 0
    manifest = json.loads((OUT / "memopt.json").read_text())
    (OUT / "training_args.yaml").rename(OUT / "added_tokens.json")
    manifest["files"]["added_tokens.json"] = manifest["files"].pop("training_args.yaml")
    manifest["emitted"] = ["added_tokens.json", "recipe.yaml"]
    (OUT / "memopt.json").write_text(json.dumps(manifest, indent=1))
    assert failed(OUT) == {"weights.manifest": "added_tokens.json is no file that `--emit` writes"}


def test_one_engine_may_be_a_string() -> None:
    assert check_kinds("trainer") == ("trainer",)


def test_a_file_of_the_models_own_is_not_replaced(memopt: Memopt, llama: Path) -> None:
    (llama / "axolotl.yaml").write_text("base_model: other\n")
    run = memopt("patch", llama, "--emit", "axolotl")
    assert (run.code, OUT.exists()) == (2, False)
    assert "has its own axolotl.yaml" in run.err


@pytest.mark.parametrize("command", ["patch", "report"])
def test_an_unknown_engine_is_refused_before_the_model_is_looked_for(memopt: Memopt, command: str) -> None:
    run = memopt(command, "MODEL", "--emit", "deepsped")
    assert run.code == 2
    assert "'deepsped' is no engine. Did you mean 'deepspeed'?" in run.err


def test_an_unknown_engine_is_refused_without_torch() -> None:
    code = """
import sys
from memopt.cli.main import main
found = main(["patch", "MODEL", "--emit", "deepsped"])
sys.exit(found if "torch" not in sys.modules else 9)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 2


@pytest.mark.parametrize("options", [["--budget", "24GiB"], ["--out", "plan"], ["--frontier", "--out", "plan"]])
def test_report_needs_a_plan_and_a_folder(memopt: Memopt, options: list[str]) -> None:
    run = memopt("report", "MODEL", "--emit", "trainer", *options)
    assert run.code == 2
    assert "--emit writes the plan of --budget into the folder --out" in run.err


def test_what_no_plan_can_express_is_refused_before_the_model_is_looked_for(memopt: Memopt, tmp_path: Path) -> None:
    out = tmp_path / "plan"
    run = memopt("report", "MODEL", "--budget", "1GiB", "--train", "lora", "--emit", "torchtitan", "--out", out)
    assert (run.code, out.exists()) == (2, False)
    assert "--emit torchtitan: its configuration cannot express LoRA. Plan with --train full." in run.err


def test_report_writes_the_plan_and_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    recipe = load_recipe("exact-unfolded", ("checkpointing.method=full",))
    plan = Plan(recipe, "2 blocks checkpointed", 2, 4, 1 << 30, 0.5, 0.25)
    choice = Choice("MODEL", "batch 8", "A100", 2 << 30, plan, step=Training(8, 64), blocks=("model.layers.0",))
    monkeypatch.setattr(training, "plan_training", lambda *_, **__: choice)
    out = tmp_path / "new" / "plan"
    code = main(["report", "MODEL", "--budget", "2GiB", "--emit", "trainer", "--emit", "torchtitan", "--out", str(out)])
    assert code == 0
    assert load_recipe(out / "recipe.yaml") == recipe
    assert yaml.safe_load((out / "training_args.yaml").read_text())["gradient_accumulation_steps"] == 4
    assert "activation-checkpoint:full" in (out / "torchtitan.args").read_text()
    assert f"memopt.patch(model, '{out / 'recipe.yaml'}')" in capsys.readouterr().err
    (out / "training_args.yaml").write_text("mine")
    again = ["report", "MODEL", "--budget", "2GiB", "--emit", "trainer", "--out", str(out), "--json"]
    assert main(again) == 2
    assert "replace it with --force" in capsys.readouterr().out
    assert (out / "training_args.yaml").read_text() == "mine"
    assert main([*again, "--force"]) == 0
    assert (out / "training_args.yaml").read_text() != "mine"
    written = json.loads(capsys.readouterr().out)["written"]
    assert written == [str(out / "recipe.yaml"), str(out / "training_args.yaml")]


def test_a_plan_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    out = tmp_path / "plan"
    code = main(["report", str(tmp_path), "--budget", "2GiB", "--emit", "trainer", "--out", str(out)])
    assert (code, out.exists()) == (2, False)
