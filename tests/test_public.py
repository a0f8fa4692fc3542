"""The names that `import memopt` offers, and what is printed of what they return."""

from __future__ import annotations

import copy
import importlib.util
import pickle
from pathlib import Path

import pytest

import memopt
from memopt.errors import InputsError, NegativeVerdict, UsageError
from tests.factories import tiny_config, tiny_inputs, tiny_model


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("public")
    tiny_model("llama").save_pretrained(root / "llama")
    return memopt.patch_checkpoint(root / "llama", root / "patched").out


def test_every_public_name_can_be_imported() -> None:
    assert all(getattr(memopt, name) is not None for name in memopt.__all__)
    assert {name for name in dir(memopt) if name.startswith("_")} == {"__version__"}
    assert not {"Any", "random", "import_module", "TYPE_CHECKING"} & set(dir(memopt))


def test_no_verb_has_the_name_of_a_module() -> None:
    # An import of such a module would put it in the verb's place.
    for name in memopt.__all__:
        spec = importlib.util.find_spec(f"memopt.{name}")
        assert spec is None or spec.origin is None, name


def test_a_dry_run_from_python_says_what_would_be_done_and_writes_nothing(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "llama")
    notes: list[str] = []
    overrides = ["ignore=[input_layernorm]", "targets=[input_layernorm, nothing]"]
    with pytest.raises(NegativeVerdict, match="Nothing in"):
        memopt.patch_checkpoint(tmp_path / "llama", tmp_path / "out", overrides=overrides, note=notes.append)
    assert any("'nothing' matches no" in note for note in notes)
    result = memopt.patch_checkpoint(tmp_path / "llama", tmp_path / "out", dry_run=True)
    assert result.written is None
    assert result.plan.counts()["norm"] == {"fold": 4, "share": 1}
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("verb", ["fit", "report", "verify", "load", "patch_checkpoint", "unpatch_checkpoint"])
def test_a_model_in_memory_is_no_folder(verb: str) -> None:
    model = tiny_model("llama")
    with pytest.raises(UsageError, match=r"LlamaForCausalLM was given for a path .* it was loaded from\.$"):
        getattr(memopt, verb)(model)
    model.name_or_path = "hub/name"
    with pytest.raises(UsageError, match=r"loaded from: hub/name\.$"):
        getattr(memopt, verb)(model)
    with pytest.raises(UsageError, match="NoneType was given"):
        getattr(memopt, verb)(None)


def test_arguments_of_other_types_are_refused_in_words(patched: Path, tmp_path: Path) -> None:
    stock = patched.parent / "llama"
    with pytest.raises(UsageError, match="int was given for a path"):
        memopt.patch_checkpoint(stock, 3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="'24' has no unit"):
        memopt.fit(stock, gpu=24)  # type: ignore[arg-type]
    with pytest.raises(InputsError, match="keyword arguments of the model's forward, not list"):
        memopt.patch(tiny_model("llama"), inputs=[1])  # type: ignore[arg-type]


def test_a_batch_in_memory_is_remembered_without_a_file(patched: Path, tmp_path: Path) -> None:
    batch = tiny_inputs("llama", 1, 8)
    result = memopt.patch_checkpoint(patched.parent / "llama", tmp_path / "out", inputs=batch)
    assert result.written is not None
    assert result.written.manifest.inputs is not None
    assert result.written.manifest.inputs.file is None
    assert result.written.manifest.inputs.arguments.keys() == batch.keys()


def test_a_result_at_the_end_of_a_cell_of_a_notebook_is_shown_as_it_is_printed(patched: Path, tmp_path: Path) -> None:
    stock = patched.parent / "llama"
    made = memopt.patch_checkpoint(stock, tmp_path / "out", dry_run=True)
    for result in (
        made,
        made.plan,
        memopt.plan_for(tiny_model("llama")),
        memopt.fit(stock, seq=8),
        memopt.report(stock, seq=8),
        memopt.verify(patched, level="weights"),
        memopt.summary(tiny_model("llama")),
    ):
        assert repr(result) == str(result)
        assert f"{type(result).__name__}(" not in repr(result)
    assert repr(made).splitlines()[:3] == [
        f"Would write {tmp_path / 'out'}", "Recipe 'exact':", "  5 norms: 4 folded, 1 shared",
    ]  # fmt: skip
    written = memopt.patch_checkpoint(stock, tmp_path / "out")
    assert repr(written).startswith(f"Wrote {tmp_path / 'out'}\n")


def test_a_verdict_is_printed_as_the_table_of_its_checks(patched: Path) -> None:
    printed = str(memopt.verify(patched, level="weights"))
    assert "weights" in printed
    assert "elements that differ: 0 (limit 0)" in printed
    assert printed.endswith("status: pass")
    assert max(map(len, printed.splitlines())) <= 80


def test_a_level_that_does_not_exist_is_an_error(patched: Path) -> None:
    with pytest.raises(UsageError, match="There is no level 'weight'"):
        memopt.verify(patched, level="weight")  # type: ignore[arg-type]


def test_a_report_is_printed_as_its_tables(tmp_path: Path) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    comparison = memopt.report(tmp_path, seq=32, batch=2, train="lora", lora_targets=["q", "v"])
    assert comparison.training.lora_targets == ("q", "v")
    assert comparison.after.total < comparison.before.total
    assert "saved for backward: " in str(comparison)
    assert "LoRA rank 8 on q, v" in str(comparison)


def test_the_summary_of_a_stock_model_is_one_sentence() -> None:
    model = tiny_model("llama")
    assert str(memopt.summary(model)) == "This model is not patched; memopt.patch(model) patches it."


def test_the_summary_says_the_recipe_the_counts_and_the_way_back() -> None:
    model = memopt.patch(tiny_model("llama"))
    lines = str(memopt.summary(model)).splitlines()
    assert lines[0].startswith("Patched by recipe 'exact-unfolded': ")
    assert "  5 norms: 5 shared" in lines
    assert lines[-1] == "Undo: memopt.unpatch(model)"
    assert memopt.summary(model).recipe == "exact-unfolded"


def test_a_loaded_model_has_a_summary(patched: Path) -> None:
    assert memopt.summary(memopt.load(patched)).recipe == "exact"


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_a_copy_has_the_same_summary(copied) -> None:
    model = memopt.patch(tiny_model("llama"))
    assert str(memopt.summary(copied(model))) == str(memopt.summary(model))
    assert memopt.summary(memopt.unpatch(copied(model))).modules == 0
    assert memopt.summary(model).modules > 0


def test_nothing_is_left_on_a_model_that_was_unpatched() -> None:
    model = tiny_model("llama")
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    memopt.unpatch(memopt.patch(model))
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert memopt.summary(model).plan is None


def test_a_model_around_a_patched_one_has_its_summary() -> None:
    peft = pytest.importorskip("peft")
    model = memopt.patch(tiny_model("llama"))
    text = str(memopt.summary(model))
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
    assert str(memopt.summary(adapted)) == text
    assert memopt.summary(memopt.unpatch(adapted)).modules == 0


def test_a_part_of_a_patched_model_says_that_it_is_one() -> None:
    model = memopt.patch(tiny_model("llama"))
    assert str(memopt.summary(model.model.layers[0])).startswith("Part of a patched model: ")
