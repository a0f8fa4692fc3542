"""A patch in a folder outside of the package: everything knows it once it is registered, and no other file changes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import memopt
from memopt.cli.main import main
from memopt.errors import RecipeError
from memopt.patches.registry import patches, register, unregister
from memopt.patches.swap import is_swapped
from memopt.plan.plan import coverage_totals
from memopt.plan.recipe import load_recipe
from memopt.trace.account import account
from tests.factories import tiny_inputs, tiny_model
from tests.support.compare import step_gradients

OFF = ("activations.method=none", "gated_mlps.method=none")
ON = (*OFF, "toys.method=shrink")
GATES = [f"bert.encoder.layer.{layer}.intermediate.intermediate_act_fn" for layer in (0, 1)]


@pytest.fixture(autouse=True)
def toy() -> Iterator[None]:
    patch = register("tests.toy_patch")
    yield
    unregister(patch)


def gated() -> nn.Module:
    return tiny_model("bert", hidden_act="quick_gelu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("toy") / "gated"
    gated().save_pretrained(path)  # type: ignore[operator]
    return path


def settings(*pairs: str) -> list[str]:
    return [word for pair in pairs for word in ("--set", pair)]


def test_it_has_a_place_behind_what_it_waits_for_and_a_key_in_every_recipe() -> None:
    names = [patch.name for patch in patches()]
    assert names.index("toy_patch") > names.index("activation")
    assert load_recipe("exact").model_dump()["toys"] == {"method": "none"}
    with pytest.raises(RecipeError, match="Did you mean 'toys'"):
        load_recipe("exact", ["toy.method=shrink"])


def test_no_second_patch_has_its_name() -> None:
    with pytest.raises(ValueError, match="'toy_patch' has its name"):
        register("tests.toy_patch")


def test_its_sites_are_planned_and_shown() -> None:
    model = gated()
    plan = memopt.plan_for(model, load_recipe("exact-unfolded", ON))
    rows = [(entry.site, entry.action, entry.reason) for entry in plan.entries if entry.kind == "toy"]
    assert rows == [(name, "shrink", "keeps its input only") for name in GATES]
    assert "2 toy gates: 2 shrunk" in coverage_totals(plan)
    off = memopt.plan_for(model, load_recipe("exact-unfolded", OFF))
    assert "2 toy gates: 2 left" in coverage_totals(off)


def test_it_is_applied_saves_bytes_keeps_gradients_and_is_undone() -> None:
    inputs, runs = tiny_inputs("bert"), []
    for recipe in (None, load_recipe("exact-unfolded", OFF), load_recipe("exact-unfolded", ON)):
        model = gated()
        if recipe is not None:
            memopt.patch(model, recipe)
        runs.append((account(model, lambda model=model: model(**inputs).loss).total, step_gradients(model, inputs)))
    (_, stock), (without, _), (total, patched) = runs
    assert total < without
    torch.testing.assert_close(patched, stock)
    assert [name for name, module in model.named_modules() if is_swapped(module) and name in GATES] == GATES
    memopt.unpatch(model)
    assert not any(is_swapped(module) for module in model.modules())


def test_the_commands_patch_verify_and_report_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["patch", str(folder), "--out", str(out), *settings(*ON)]) == 0
    assert "2 toy gates: 2 shrunk" in capsys.readouterr().out
    assert main(["verify", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "pass"
    totals = []
    for source, words in ((folder, ["--recipe", str(without_it(tmp_path))]), (out, [])):
        assert main(["report", str(source), *words, "--seq", "32", "--json"]) == 0
        totals.append(json.loads(capsys.readouterr().out)["summary"]["after"])
    assert totals[1] < totals[0]


def test_once_it_is_gone_its_key_is_unknown() -> None:
    unregister(next(patch for patch in patches() if patch.name == "toy_patch"))
    try:
        with pytest.raises(RecipeError, match="unknown key 'toys'"):
            load_recipe("exact", ON)
    finally:
        register("tests.toy_patch")


def without_it(folder: Path) -> Path:
    path = folder / "without.yaml"
    path.write_text("activations: {method: none}\ngated_mlps: {method: none}\nnorms: {fold: none}\n")
    return path
