"""What the plan makes of norms: cautions are kept or folded as the recipe says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memopt.errors import RecipeError
from memopt.plan import Plan, make_plan
from memopt.recipe import load_recipe
from memopt.walk.sites import Consumer, LinearSite, NormSite, Reach, Sites

CAUTION = "its output is returned as last_hidden_state by model"
LAST = NormSite(
    name="model.norm",
    kind="rms",
    hidden_size=4,
    eps=1e-6,
    weight="model.norm.weight",
    consumers=(Consumer("lm_head.weight", "lm_head", 1),),
    cautions=(CAUTION,),
    reaches=(
        Reach("model output", "last_hidden_state", "model", auxiliary=True),
        Reach("model output", "encoder_last_hidden_state", "", auxiliary=True),
    ),
)


def plan_of(norm: NormSite, *settings: str) -> Plan:
    return make_plan(Sites("M", "m", norms=(norm,)), load_recipe("exact", settings))


def test_a_norm_with_a_caution_is_shared_and_told_how_to_fold_it() -> None:
    plan = plan_of(LAST)
    (entry,) = plan.entries
    assert (entry.action, entry.reason) == (
        "share",
        f"not folded: {CAUTION}; `--set norms.hidden_states=change` folds it",
    )
    assert plan.changed_outputs() == ()


def test_a_recipe_folds_it_and_says_what_changes() -> None:
    plan = plan_of(LAST, "norms.hidden_states=change")
    (entry,) = plan.entries
    assert (entry.action, entry.reason) == ("fold", f"into lm_head.weight; changes a hidden state: {CAUTION}")
    assert plan.changed_outputs() == ("encoder_last_hidden_state",)


def test_an_obstacle_is_an_obstacle_whatever_the_recipe_says() -> None:
    plan = plan_of(replace(LAST, fold_obstacles=("tied",)), "norms.hidden_states=change")
    assert [(e.action, e.reason) for e in plan.entries] == [("share", f"not folded: tied; {CAUTION}")]


def test_never_is_never() -> None:
    plan = plan_of(LAST, "norms.hidden_states=change", "norms.fold=never")
    assert [entry.action for entry in plan.entries] == ["share"]


def test_other_values_are_errors() -> None:
    with pytest.raises(RecipeError, match=r"norms\.hidden_states.*'keep' or 'change'"):
        load_recipe("exact", ["norms.hidden_states=yes please"])


@pytest.mark.parametrize(
    ("intermediates", "fed_by", "action"),
    [(False, None, "keep"), (False, "norm", "recompute"), (True, None, "recompute")],
)
def test_a_norm_runs_again_where_that_saves_something(intermediates: bool, fed_by: str | None, action: str) -> None:
    norm = NormSite("norm", "channels", 8, 0.0, "norm.weight", intermediates=intermediates, fold_obstacles=("no",))
    sites = replace(
        plan_of(LAST).sites, norms=(norm,), linears=(LinearSite("conv.weight", "conv", (4, 8), fed_by=fed_by),)
    )
    entry = next(entry for entry in make_plan(sites, load_recipe("exact")).entries if entry.site == "norm")
    assert entry.action == action
