"""Settings of a recipe that choose modules by names: one rule for all of them, and a word where nothing matches."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from torch import nn

import memopt
from memopt.cli.main import main
from memopt.errors import NegativeVerdict
from memopt.patches.base import any_matches
from memopt.patches.swap import is_swapped
from memopt.plan.plan import Plan
from memopt.plan.recipe import Recipe
from tests.factories import tiny_model

FULL = "checkpointing.method=full"


def recipe(*settings: str) -> Recipe:
    return memopt.load_recipe("exact-unfolded", settings)


def with_adapters() -> nn.Module:
    return get_peft_model(tiny_model("llama"), LoraConfig(r=2, target_modules="all-linear"))  # type: ignore[no-any-return]


def plan_of(model: nn.Module, *settings: str) -> Plan:
    return memopt.plan_for(model, recipe(*settings))


@pytest.mark.parametrize(
    ("pattern", "is_matched"),
    [
        ("model.layers.0.mlp", True),
        ("layers.0.mlp", True),
        ("model.layers.*.mlp", True),
        ("layers.?.mlp", True),
        ("mlp", True),
        ("model.layers.0", True),
        ("layers.[01]", True),
        ("lp", False),
        ("ayers.*.mlp", False),
        ("mlp.up_proj", False),
        ("layers.1", False),
    ],
)
def test_a_pattern_matches_the_end_of_a_name_or_of_a_module_around_it(pattern: str, is_matched: bool) -> None:
    for prefix in ("", "base_model.model."):
        assert any_matches(f"{prefix}model.layers.0.mlp", [pattern]) is is_matched


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ((FULL, "checkpointing.blocks=['model.layers.*']"), "checkpointing"),
        (("linears.recompute=['model.layers.*.mlp']",), "linear"),
        (("targets=['model.layers.*.mlp']",), "gated_mlp"),
    ],
)
def test_a_wildcard_chooses_the_same_modules_before_and_after_adapters(settings: tuple[str, ...], kind: str) -> None:
    plain, adapted = (plan_of(model, *settings) for model in (tiny_model("llama"), with_adapters()))
    of_base = [site for site in adapted.rewrites if site.kind == kind and "lora_" not in site.site]
    assert len(of_base) == len([site for site in plain.rewrites if site.kind == kind]) > 0
    assert plain.idle == adapted.idle == ()


@pytest.mark.parametrize("pattern", ["model.layers.0", "layers.0", "layers.0.*"])
def test_a_block_that_is_ignored_stays_as_it_is_and_one_that_is_the_target_is_patched_alone(pattern: str) -> None:
    ignoring = memopt.patch(tiny_model("llama"), recipe(f"ignore=['{pattern}']"))
    aimed = memopt.patch(tiny_model("llama"), recipe(f"targets=['{pattern}']"))
    swapped = [{name for name, module in model.named_modules() if is_swapped(module)} for model in (ignoring, aimed)]
    first = [{name for name in names if name.startswith("model.layers.0.")} for names in swapped]
    assert not first[0]
    assert first[1]
    assert {name for name in swapped[0] if name.startswith("model.layers.1.")}
    assert not {name for name in swapped[1] if name.startswith("model.layers.1.")}


@pytest.mark.parametrize("pattern", ["model.layers.0.mlp", "mlp", "layers.*.mlp", "up_proj", "model.layers.1", "typo"])
@pytest.mark.parametrize(
    "key",
    ["targets", "ignore", "linears.recompute", "linears.targets", "checkpointing.blocks", "checkpointing.offload"],
)
def test_a_pattern_is_said_to_match_nothing_exactly_where_it_has_no_effect(key: str, pattern: str) -> None:
    always = [FULL, "checkpointing.offload=[]"] if key.startswith("checkpointing") else ["linears.method=uniform"]
    model = tiny_model("llama")
    without, named = (plan_of(model, *always, f"{key}={value}") for value in ("[]", f"[{pattern}]"))
    assert (without.entries == named.entries) is bool(named.idle)


#: A setting for each note of a plan -> the beginning of the note.
SAID = {
    "targets=[typo,'*']": "targets 'typo' matches no",
    "ignore=[typo]": "ignore 'typo' matches no",
    "linears.recompute=[typo]": "linears.recompute 'typo' matches no linear",
    "linears.targets=[typo]": "linears.targets 'typo' matches no linear",
    f"{FULL} checkpointing.blocks=[typo]": "checkpointing.blocks 'typo' matches no block",
    f"{FULL} checkpointing.offload=[typo]": "checkpointing.offload 'typo' matches no block",
    f"{FULL} checkpointing.keep=[typo]": "checkpointing.keep 'typo' matches no block",
    "checkpointing.method=every-n checkpointing.count=4": "checkpointing.count has no effect, because",
    f"{FULL} checkpointing.n=3": "checkpointing.n has no effect, because checkpointing.method is full",
    "loss.method=lean loss.room=8": "loss.room has no effect, because loss.method is lean",
    "tiles.method=tokens tiles.tokens=8 tiles.room=8": "tiles.room has no effect, because tiles.tokens is 8",
    "checkpointing.keep=attention": "checkpointing.keep has no effect, because checkpointing.method is none",
    "activations.where=all": "activations.where has no effect, because activations.code is none",
    "attention.implementation=flash_attention_3": "attention.implementation has no effect on this machine, because",
    "linears.recompute=auto linears.budget=0.5": "linears.budget has no effect, because linears.method is none",
    "linears.method=uniform": "samples no linear of this model",
    "tiles.method=tokens ignore=[mlp]": "runs modules by tiles, and no block",
    "compression.method=int8 gradient_error=0.1": "the gradient is off by up to 10%",
    "compression.method=int8": "the gradient is off by a part that gradient_error, which is 0, does not declare",
}


@pytest.mark.parametrize("settings", SAID)
def test_a_note_of_the_plan_is_logged_and_in_the_summary(settings: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "memopt")
    model = memopt.patch(tiny_model("llama"), recipe(*settings.split()))
    said = [record for record in caplog.records if SAID[settings] in record.message]
    assert len(said) == 1
    assert said[0].levelname == ("WARNING" if "typo" in settings or "no effect" in SAID[settings] else "INFO")
    assert str(memopt.summary(model)).count(SAID[settings]) == 1


@pytest.mark.parametrize("options", [[], ["-v"], ["--train", "lora"]])
@pytest.mark.rotates(3)
def test_every_note_of_the_plan_is_in_the_report_once(
    options: list[str], llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for together in notes_together() if not options else [list(SAID)[-1:]]:
        pairs = [word for settings in together for each in settings.split() for word in ("--set", each)]
        assert main(["report", str(llama), "--seq", "8", *options, *pairs]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert {settings: out.count(SAID[settings]) for settings in together} == dict.fromkeys(together, 1)


def notes_together() -> list[list[str]]:
    """The settings of `SAID` for few reports: those of one report are in different sections of the recipe."""
    found: list[tuple[set[str], list[str]]] = []
    for settings in SAID:
        sections = {each.partition("=")[0].partition(".")[0] for each in settings.split()}
        free = next((each for each in found if each[0].isdisjoint(sections)), None)
        if free is None:
            found.append(free := (set(), []))
        free[0].update(sections)
        free[1].append(settings)
    return [together for _, together in found]


def test_the_answer_of_fit_and_a_folder_that_is_loaded_say_the_notes_too(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert "matches no linear" in str(memopt.fit(llama, seq=8, recipe=recipe("linears.recompute=[typo]")))
    memopt.patch_checkpoint(llama, tmp_path / "out", overrides=["ignore=[typo]"])
    caplog.clear()
    memopt.load(tmp_path / "out")
    assert any("ignore 'typo' matches no" in record.message for record in caplog.records)


def test_targets_that_match_nothing_are_named_in_the_error() -> None:
    with pytest.raises(NegativeVerdict, match="can be patched") as raised:
        memopt.patch(tiny_model("llama"), recipe("targets=['typo.*']"))
    assert "targets 'typo.*' matches no" in str(raised.value)
    assert "memopt.plan_for(model, recipe)" in str(raised.value)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("patterns") / "llama"
    tiny_model("llama").save_pretrained(folder)
    return folder
