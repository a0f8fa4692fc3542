"""What the plan makes of norms with cautions, and of linears that might be sampled."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memopt.errors import RecipeError
from memopt.plan.plan import Plan, coverage_totals, make_plan
from memopt.plan.recipe import load_recipe
from memopt.walk.sites import ActivationSite, Consumer, DropoutSite, LinearSite, NormSite, Reach, Sites

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


def test_a_norm_with_a_caution_is_shared_and_its_reason_says_how_to_fold_it() -> None:
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


def test_none_is_none() -> None:
    plan = plan_of(LAST, "norms.hidden_states=change", "norms.fold=none")
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


# --- linears that might be sampled -----------------------------------------------------------------------------------

BLOCK = "layers.0"
FC2 = LinearSite(f"{BLOCK}.fc2.weight", f"{BLOCK}.fc2", (8, 32), 32)
GELU = ActivationSite(f"{BLOCK}.act", "gelu_erf", True, next_linear=FC2.parameter)
RELU = ActivationSite(f"{BLOCK}.act", "relu", True, next_linear=FC2.parameter)
NORM = NormSite(f"{BLOCK}.norm", "layer", 8, 1e-5, f"{BLOCK}.norm.weight")
QUERY, KEY = (
    LinearSite(f"{BLOCK}.{name}.weight", f"{BLOCK}.{name}", (8, 8), 8, input_shared_with=(f"{BLOCK}.{other}.weight",))
    for name, other in (("q", "k"), ("k", "q"))
)


def reasons(
    *linears: LinearSite, recipe: str = "sampled", settings: tuple[str, ...] = (), **sites: object
) -> dict[str, str]:
    """Last part of each linear's module -> "sample", or why it is not."""
    found = Sites("M", "m", linears=linears, blocks=(BLOCK,), hidden_size=8, **sites)  # type: ignore[arg-type]
    plan = make_plan(found, load_recipe(recipe, settings))
    entries = (entry for entry in plan.entries if entry.kind == "linear")
    return {e.site.split(".")[-2]: "sample" if e.action == "sample" else e.reason for e in entries}


@pytest.mark.parametrize("recipe", ["exact", "sampled"])
@pytest.mark.parametrize("off", [False, True])
def test_a_linear_that_reads_a_recomputed_input_is_counted_as_such(recipe: str, off: bool) -> None:
    linears = (replace(FC2, fed_by=NORM.name), replace(QUERY, fed_by="something else", saved_by=("mul in x",)))
    sites = Sites("M", "m", linears=linears, norms=(NORM,), blocks=(BLOCK,), hidden_size=8)
    plan = make_plan(sites, load_recipe(recipe, ["norms.method=none"] if off else []))
    of_linears = {e.site: e.action for e in plan.entries if e.kind == "linear"}
    action = "read recomputed" if not off else "keep" if recipe == "exact" else "sample"
    assert of_linears == {FC2.parameter: action, QUERY.parameter: "keep"}
    assert not [entry for entry in plan.rewrites if entry.action == "read recomputed"]
    if not off:
        assert "2 linears: 1 reading a recomputed input, 1 left" in coverage_totals(plan)


def test_what_nobody_else_holds_is_sampled() -> None:
    assert reasons(FC2) == {"fc2": "sample"}
    assert reasons(FC2, recipe="exact") == {"fc2": "exact as it is"}


def test_an_input_that_an_operation_keeps_is_not() -> None:
    held = replace(FC2, saved_by=("scaled_dot_product_attention in layers.0.attn",))
    assert reasons(held) == {"fc2": "0 bytes: also held by scaled_dot_product_attention in layers.0.attn"}


def test_a_recomputed_input_is_not_sampled_unless_a_code_replaces_its_source() -> None:
    fed = replace(FC2, fed_by=GELU.name)
    assert reasons(fed, activations=(GELU,)) == {"fc2": "sample"}
    exact = reasons(fed, activations=(GELU,), settings=("activations.code=none",))
    assert exact == {"fc2": f"0 bytes: recomputed from tensors that {GELU.name} saves anyway"}


def test_a_relu_holds_it_unless_it_keeps_a_mask() -> None:
    held = replace(FC2, fed_by=RELU.name, saved_by=(f"relu in {RELU.name}",))
    assert reasons(held, activations=(RELU,)) == {"fc2": "sample"}
    whole = reasons(held, activations=(RELU,), settings=("activations.relu=none",))
    assert whole == {"fc2": f"0 bytes: also held by relu in {RELU.name}"}


def test_a_norm_that_keeps_its_output_holds_it() -> None:
    fed = [replace(site, fed_by=NORM.name) for site in (QUERY, KEY)]
    shared = reasons(*fed, norms=(NORM,))
    assert all(reason.startswith(f"0 bytes: also held by the norm {NORM.name}") for reason in shared.values())
    assert reasons(*fed, norms=(NORM,), settings=("norms.method=none",)) == {"q": "sample", "k": "sample"}


def test_the_input_of_a_block_is_in_its_callers_hands() -> None:
    given = replace(FC2, given_to=(BLOCK, f"{BLOCK}.mlp"))
    assert reasons(given) == {"fc2": f"0 bytes: also held by the caller of {BLOCK}, whose input it is"}
    assert reasons(replace(FC2, given_to=(f"{BLOCK}.mlp",))) == {"fc2": "sample"}


def test_one_reader_that_keeps_it_keeps_it_for_all() -> None:
    assert reasons(QUERY, KEY) == {"q": "sample", "k": "sample"}
    left = reasons(QUERY, KEY, settings=("linears.targets=[q]",))
    assert left == {"q": f"0 bytes: also held by {KEY.parameter}", "k": "excluded by the recipe's targets or ignore"}


def test_experts_adapters_and_heads_are_left() -> None:
    experts = replace(FC2, shape=(4, 8, 32))
    assert "not one matrix" in reasons(experts)["fc2"]
    head = LinearSite("head.weight", "head", (8, 8), 8)
    assert "outside the repeated blocks" in reasons(head)["head"]
    assert "has 1 channels" in reasons(replace(FC2, width=1))["fc2"]


def test_the_exact_alternative_is_named_with_every_plan_that_samples() -> None:
    sites = Sites("M", "m", linears=(FC2,), blocks=(BLOCK,), hidden_size=8)
    (note,) = (note for note in make_plan(sites, load_recipe("wta-crs")).notes if "gradient accumulation" in note)
    assert "30%" in note
    none = make_plan(replace(sites, linears=()), load_recipe("wta-crs"))
    assert any("samples no linear" in note for note in none.notes)


@pytest.mark.parametrize(("recipe", "action"), [("exact", "keep"), ("wta-crs", "seed")])
def test_dropouts_keep_seeds_where_the_recipe_says_so(recipe: str, action: str) -> None:
    drop, off = DropoutSite("drop", 0.1), DropoutSite("off", 0.0)
    functions = [DropoutSite(name, 0.1, is_module=False) for name in (f"{BLOCK}.attention", BLOCK, "", "layers")]
    sites = Sites("M", "m", dropouts=(drop, off, *functions), blocks=(BLOCK,))
    actions = {entry.site: entry.action for entry in make_plan(sites, load_recipe(recipe)).entries}
    assert {name: actions.pop(name) for name in ("off", "", "layers")} == dict.fromkeys(("off", "", "layers"), "keep")
    assert set(actions.values()) == {action}


@pytest.mark.parametrize(("recipe", "action"), [("exact", "recompute"), ("int8", "keep")])
def test_softmaxes_of_blocks_are_recomputed_where_the_recipe_says_so(recipe: str, action: str) -> None:
    names = ("", "layers", BLOCK, f"{BLOCK}.attention", "beside")
    plan = make_plan(Sites("M", "m", softmaxes=names, blocks=(BLOCK,)), load_recipe(recipe))
    actions = {entry.site: entry.action for entry in plan.entries}
    # What surrounds the blocks would look at every function of the model.
    assert {name: actions.pop(name) for name in ("", "layers")} == {"": "keep", "layers": "keep"}
    assert set(actions.values()) == {action}


@pytest.mark.parametrize(
    ("settings", "accuracy"),
    [
        ((), "exact"),
        (("gradient_error=0.1",), "exact"),
        (("compression.method=int8", "gradient_error=0.1"), "10% off"),
        (("compression.method=int8",), "approximate, undeclared"),
        (("linears.method=wta-crs",), "sampled"),
        (("activations.code=2bit", "gradient_error=0.3", "linears.method=crs"), "30% off; sampled"),
        (("activations.code=2bit", "activations.method=none"), "exact"),
    ],
)
def test_the_accuracy_of_a_recipe_follows_from_its_rules(settings: tuple[str, ...], accuracy: str) -> None:
    assert load_recipe("exact", settings).accuracy == accuracy


def test_patterns_that_match_no_linear_are_noted() -> None:
    sites = Sites("M", "m", linears=(FC2,), blocks=(BLOCK,), hidden_size=8)
    notes = make_plan(sites, load_recipe("wta-crs", ["linears.targets=fc3"])).notes
    assert any("linears.targets 'fc3' matches no linear" in note for note in notes)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("linears.method=topk", r"linears\.method.*cannot be 'topk'"),
        ("linears.budget=0", r"'linears\.budget' cannot be '0'\. It should be greater than 0\.$"),
        ("linears.budget=1.5", r"'linears\.budget' cannot be '1\.5'\. It should be less than 1\.$"),
        ("linears.budget=much", r"'linears\.budget' cannot be 'much'\. It should be a valid number\.$"),
        ("norms=none", r"'norms' cannot be 'none'\. It should be a group of keys, e\.g\. norms\.method\.$"),
        ("checkpointing.method=count", r"'checkpointing': 'count' needs the number of blocks, e\.g\. checkpointing\.c"),
        ("linears.budgit=0.5", "Did you mean 'budget'"),
        ("dropouts.method=mask", r"dropouts\.method.*cannot be 'mask'"),
    ],
)
def test_bad_settings_are_errors(setting: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe("sampled", [setting])


def test_whatever_has_a_method_can_be_switched_off_by_the_same_word() -> None:
    recipe = load_recipe("sampled")
    groups = {key: rules for key, rules in recipe.model_dump().items() if isinstance(rules, dict)}
    keys = [key for key, rules in groups.items() if "method" in rules]
    off_by_method = "norms gated_mlps activations linears dropouts softmaxes functions loss compression checkpointing"
    assert {*off_by_method.split(), "tiles"} <= set(keys)  # a patch that is added needs no change here
    assert groups.keys() - keys == {"attention"}
    off = load_recipe(recipe, [f"{key}.method=none" for key in keys])
    plan = make_plan(Sites("M", "m", norms=(LAST,), linears=(FC2,), activations=(GELU,), blocks=(BLOCK,)), off)
    assert plan.does_nothing


@pytest.mark.parametrize(
    ("setting", "allowed"),
    [
        (
            "attention.implementation=flash",
            "'keep', 'sdpa', 'flash_attention_2', 'flash_attention_3', 'flex_attention' or 'eager'",
        ),
        ("linears.recompute=5", "'none', 'auto' or a list of module names"),
        ("linears.targets=[1]", "'auto' or a list of module names"),
        ("checkpointing.blocks=5", "'auto' or a list of module names"),
        ("ignore=5", "a list of module names"),
        ("targets=[5]", "a list of module names"),
        ("norms.method=off", "'share' or 'none'"),
    ],
)
def test_the_error_about_a_value_has_all_that_are_allowed(setting: str, allowed: str) -> None:
    with pytest.raises(RecipeError) as raised:
        load_recipe("exact", [setting])
    key = setting.partition("=")[0]
    assert str(raised.value).startswith(f"Recipe 'exact': '{key}' cannot be '")
    assert str(raised.value).endswith(f"Expected {allowed}.")


@pytest.mark.parametrize(
    "key", ["targets", "ignore", "linears.targets", "linears.recompute", "checkpointing.blocks", "checkpointing.keep"]
)
def test_one_name_may_stand_without_a_list(key: str) -> None:
    assert load_recipe("exact", [f"{key}=layers.0"]) == load_recipe("exact", [f"{key}=[layers.0]"])
