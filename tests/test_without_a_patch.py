"""The package without one of its patches: everything else is there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

import memopt
from memopt.patches.registry import patches
from tests.factories import tiny_model
from tests.support.processes import run_code

SOURCE = Path(memopt.__file__).parent
GONE = "dropout"
#: Runs in the copy, in one process: imports every module but the tools, which list all launches, the kernels, which
#: need Triton, and the plugins of trainers that are not installed; then runs commands. Prints the names of modules,
#: then exit code and output of each command, as JSON.
EVERYTHING = """
import contextlib, gc, io, json, pkgutil, sys, memopt
names = [m.name for m in pkgutil.walk_packages(memopt.__path__, "memopt.") if m.name != "memopt.__main__"]
for name in names:
    if ".tools" in name or name.endswith("_triton"):
        continue
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        if name not in ("memopt.axolotl", "memopt.integrations.lightning") or error.name.startswith("memopt"):
            raise
print(json.dumps([memopt.__file__, [name for name in sys.modules if name.startswith("memopt")]]))
from memopt.cli.main import main
gc.freeze()
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = main(arguments)
    print(json.dumps([code, output.getvalue()]))
"""
COMMANDS = {
    "patch": ["patch", "model", "--out", "out"],
    "verify": ["verify", "out"],
    "report": ["report", "out", "--seq", "32", "-v"],
    "recipes": ["recipes", "exact"],
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("without")
    package_without(GONE, root)
    shutil.rmtree(root / "src" / "memopt" / "kernels" / GONE)
    tiny_model("bert", hidden_dropout_prob=0.1).save_pretrained(root / "model")
    return root


def package_without(name: str, root: Path) -> None:
    shutil.copytree(SOURCE, root / "src" / "memopt", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(SOURCE.parents[1] / "configs" / "recipes", root / "configs" / "recipes")
    shutil.rmtree(root / "src" / "memopt" / "patches" / name)


@pytest.fixture(scope="module")
def lines(copy: Path) -> list[str]:
    """What `EVERYTHING` prints in the copy."""
    ran = run_code(EVERYTHING, json.dumps([*COMMANDS.values()]), folder=copy, path=[copy / "src"])
    assert ran.code == 0, ran.err
    return ran.out.splitlines()


@pytest.fixture(scope="module")
def outputs(lines: list[str]) -> dict[str, str]:
    """What each command printed; all of them exit with 0."""
    found = dict(zip(COMMANDS, map(json.loads, lines[1:]), strict=True))
    assert {name: code for name, (code, _) in found.items() if code} == {}, found
    return {name: output for name, (_, output) in found.items()}


@pytest.mark.rotates(3)
def test_every_module_can_be_imported(copy: Path, lines: list[str]) -> None:
    package, modules = json.loads(lines[0])
    assert str(copy) in package
    assert len(modules) > 100
    assert [name for name in modules if GONE in name] == []


def test_a_model_is_patched_verified_and_reported(outputs: dict[str, str]) -> None:
    assert "5 norms: 5 shared" in outputs["patch"]
    assert GONE not in "".join(line for line in outputs["patch"].splitlines() if ": " in line)
    assert "all checks passed" in outputs["verify"]
    assert "saved for backward" in outputs["report"]


def test_its_key_is_unknown_to_recipes(outputs: dict[str, str]) -> None:
    assert f"{GONE}s" not in outputs["recipes"]


#: Runs in the copy with recipes as arguments: patches and trains a model by each, makes the callback of a Trainer,
#: plans every level of its blocks and its fastest plan for a budget. Prints the patches that there are, and the number
#: of rewrites, levels and patched modules of each recipe, as JSON.
RECIPES = """
import json, sys, torch, transformers
import memopt
from memopt.patches.registry import patches
from memopt.plan.plan import make_plan
from memopt.plan.recipe import load_recipe
from memopt.prediction.planner.levels import levels_of
from memopt.prediction.planner.training import plan_model
counts = {}
for file in sys.argv[1:]:
    recipe = load_recipe(file).unfolded()
    model = transformers.AutoModelForMaskedLM.from_pretrained("model").train()
    plan = memopt.plan_for(model, recipe)
    levels = levels_of(plan.sites, recipe)
    for level in range(max(map(len, levels.options))):
        make_plan(plan.sites, levels.recipe_at([options[min(level, len(options) - 1)] for options in levels.options]))
    assert plan_model(model, "1GiB", recipe, batch=1, seq=8).plan.batch == 1
    memopt.TrainerCallback(recipe)
    memopt.patch(model, recipe)
    ids = torch.arange(8)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if name.endswith("dense.weight"))
    counts[recipe.name] = len(plan.rewrites), len(levels.beyond), memopt.summary(model).modules
print(json.dumps([[patch.name for patch in patches()], counts]))
"""
FAST = ("linear", "norm")
FOLDERS = sorted(path.parent.name for path in (SOURCE / "patches").glob("*/__init__.py"))


@pytest.mark.parametrize(
    "gone", [pytest.param(folder, marks=() if folder in FAST else pytest.mark.slow) for folder in FOLDERS]
)
@pytest.mark.rotates(3)
def test_recipes_that_do_not_name_it_and_the_planner_work_without_it(gone: str, tmp_path: Path) -> None:
    package_without(gone, tmp_path)
    tiny_model("bert").save_pretrained(tmp_path / "model")
    # A key is gone with the patch that has it; a patch that extends the rules of another one has fields of it.
    keys = {patch.rules.key for patch in patches() if patch.rules and patch.name == gone and "key" in vars(patch.rules)}
    recipes = []
    for name in ("exact", "exact-levels"):
        recipe = yaml.safe_load((tmp_path / "configs" / "recipes" / f"{name}.yaml").read_text())
        recipes.append(tmp_path / f"{name}.yaml")
        recipes[-1].write_text(yaml.safe_dump({key: value for key, value in recipe.items() if key not in keys}))
    ran = run_code(RECIPES, *map(str, recipes), folder=tmp_path, path=[tmp_path / "src"])
    assert ran.code == 0, ran.err
    there, counts = json.loads(ran.out)
    extending = {"sampled_linear"} if gone == "linear" else set()
    names = {patch.name for patch in patches()}
    assert names - set(there) == names & {gone, *extending}
    for rewrites, levels, modules in counts.values():
        assert rewrites
        assert modules
        assert levels == {"linear": 4, "checkpointing": 3}.get(gone, 7)
