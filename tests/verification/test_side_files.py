"""What lies beside the weights: a file, a value of the config or a word of memopt.json that is not as it was fails."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memopt.checkpoint.manifest import read_manifest
from memopt.checkpoint.sources.source import open_source, sha256
from memopt.checkpoint.writer import write_checkpoint
from memopt.patches.checks import Check
from memopt.plan.recipe import load_recipe
from memopt.verification.run import verify
from memopt.verification.side_files import allowed_changes
from memopt.verification.weights import verify_weights
from memopt.walk.sites import Reach
from tests.checkpoint.builders import plan_of, rms_norm, rms_tensors, write_checkpoint_files

CONFIG = {
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "rms_norm_eps": 1e-06,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "use_cache": True,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source and its patched folder."""
    root = tmp_path_factory.mktemp("side_files")
    source = write_checkpoint_files(root / "source", rms_tensors(), config=CONFIG)
    for name in ("generation_config.json", "chat_template.jinja", "preprocessor_config.json", "modeling_own.py"):
        (source / name).write_text(f"{{}} of {name}")
    (source / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    (source / "model.onnx").write_bytes(b"other weights")
    plan = plan_of([rms_norm(0), rms_norm(1)], "ignore=[model.layers.1.norm]")
    write_checkpoint(open_source(str(source)), plan, root / "patched")
    return root


@pytest.fixture
def patched(folders: Path, tmp_path: Path) -> Path:
    """A copy of the patched folder that a test may damage."""
    return Path(shutil.copytree(folders / "patched", tmp_path / "patched"))


def failed(folder: Path) -> dict[str, Check]:
    return {check.id: check for check in verify_weights(folder) if check.status == "fail"}


def rewrite(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data, indent=1))


def forge(folder: Path, name: str) -> None:
    """Give memopt.json the digest that the changed file has, so that only a comparison with the source can notice."""
    record = {"sha256": sha256(folder / name), "size": (folder / name).stat().st_size}
    rewrite(folder / "memopt.json", lambda manifest: manifest["files"].update({name: record}))


def test_what_patch_wrote_passes_and_what_it_left_out_is_named(folders: Path) -> None:
    checks = verify_weights(folders / "patched")
    assert {check.status for check in checks} == {"pass"}
    (beside,) = (check for check in checks if check.id == "weights.side_files")
    assert "model.onnx" in beside.detail


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda c: c["rope_parameters"].update(rope_theta=10001.0), "rope_parameters.rope_theta: 10001.0 instead of"),
        (lambda c: c.update(rms_norm_eps=1e-05), "rms_norm_eps"),
        (lambda c: c.update(hidden_act="gelu"), "hidden_act"),
        (lambda c: c.update(attention_dropout=0.1), "attention_dropout"),
        (lambda c: c.update(use_cache=1), "use_cache: 1 instead of true"),
        (lambda c: c.pop("tie_word_embeddings"), "tie_word_embeddings: missing"),
        (lambda c: c.update(auto_map={"AutoModel": "x.Y"}), "auto_map: added"),
    ],
)
def test_a_value_of_the_config_that_differs_fails_by_name(
    patched: Path, edit: Callable[[dict[str, Any]], object], words: str
) -> None:
    rewrite(patched / "config.json", edit)
    forge(patched, "config.json")
    found = failed(patched)
    assert set(found) == {"weights.config"}
    assert words in found["weights.config"].detail


def test_a_key_of_the_config_that_stands_twice_fails_by_name(patched: Path) -> None:
    text = (patched / "config.json").read_text()
    (patched / "config.json").write_text(text.replace("{", '{"use_cache": false,', 1))
    forge(patched, "config.json")
    assert "'use_cache' occurs twice" in failed(patched)["weights.config"].detail


@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "generation_config.json", "chat_template.jinja", "preprocessor_config.json", "modeling_own.py"],
)
def test_a_file_that_differs_from_the_sources_fails_by_name(patched: Path, name: str) -> None:
    (patched / name).write_text((patched / name).read_text() + " ")
    forge(patched, name)
    found = failed(patched)
    assert set(found) == {"weights.side_files"}
    assert f"{name} differs" in found["weights.side_files"].detail


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("license: mit", "license: none", "README.md differs"),
        ("# A model", "# Another model", "README.md differs"),
        ("<!-- memopt end -->", "", "README.md differs"),
        ("with recipe `exact`", "with recipe `other`", "README.md differs in the part that memopt wrote"),
        ("- memopt # memopt", "- other # memopt", "README.md differs in the part that memopt wrote"),
        ("", None, "README.md differs in the part that memopt wrote"),
    ],
)
def test_a_model_card_that_is_not_the_sources_with_the_section_fails(
    folders: Path, patched: Path, old: str, new: str | None, words: str
) -> None:
    card = patched / "README.md"
    text = card.read_text()
    assert old in text
    card.write_text((folders / "source" / "README.md").read_text() if new is None else text.replace(old, new))
    assert set(failed(patched)) == {"weights.files", "weights.side_files"}
    forge(patched, "README.md")
    found = failed(patched)
    assert set(found) == {"weights.side_files"}
    assert found["weights.side_files"].detail.split(";")[0] == words


def test_the_section_of_another_version_is_checked_by_its_digest(patched: Path) -> None:
    rewrite(patched / "memopt.json", lambda manifest: manifest.update(memopt_version="0.0.1"))
    assert "weights.side_files" not in failed(patched)
    (patched / "README.md").write_text((patched / "README.md").read_text().replace("# A model", "# B"))
    assert "weights.side_files" in failed(patched)


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("name", ["sub/added.py", "pytorch_model.bin", "model.safetensors.index.json"])
def test_a_file_that_was_added_fails_by_name(patched: Path, name: str, listed: bool) -> None:
    (patched / name).parent.mkdir(exist_ok=True)
    (patched / name).write_text("{}")
    if listed:
        forge(patched, name)
    found = failed(patched)
    assert set(found) == {"weights.side_files"} | (set() if listed else {"weights.files"})
    assert all(f"{name} " in check.detail for check in found.values())


def test_an_adapter_that_was_added_fails_by_name(patched: Path) -> None:
    (patched / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base-7b"}')
    checks = {check.id: check for check in verify(patched, level="weights").checks}
    assert checks["weights.headers"].status == "fail"
    assert "adapter of 'org/base-7b'" in checks["weights.headers"].detail


def test_an_empty_list_of_files_fails(patched: Path) -> None:
    rewrite(patched / "memopt.json", lambda manifest: manifest.update(files={}))
    assert "config.json was added" in failed(patched)["weights.files"].detail


def set_fold(manifest: dict[str, Any], **values: Any) -> None:
    manifest["folds"][0]["fold"].update(values)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda m: m.update(entries=[]), "lists no site"),
        (lambda m: m["source"].update(files={}), "lists no file of the source"),
        (lambda m: m.update(entries=m["entries"][1:]), "model.layers.0.norm is folded by no entry"),
        (lambda m: m["entries"][1].update(action="fold"), "model.layers.1.norm is folded by its plan, but there is no"),
        (lambda m: m["entries"][0].update(action="recoded"), "'recoded' is not an action for a norm"),
        (lambda m: m.update(folds=m["folds"] * 2), "model.layers.0.norm is folded twice"),
        (lambda m: m["recipe"]["norms"].update(fold="none"), "folds nothing"),
        (lambda m: m["recipe"].update(ignore=["model.layers.*"]), "leaves out model.layers.0.norm"),
        (lambda m: m["recipe"].update(ignore=[]), "memopt.recipe.ignore"),
        (lambda m: m.update(changed_outputs=["last_hidden_state"]), "may change last_hidden_state"),
        (lambda m: m.update(memopt_version="0.0.1"), "memopt.version"),
        (lambda m: m["source"].update(commit="abc"), "memopt.commit"),
        (lambda m: set_fold(m, offset=1), "memopt.folds"),
    ],
)
def test_a_manifest_that_contradicts_itself_or_the_config_fails(
    patched: Path, edit: Callable[[dict[str, Any]], object], words: str
) -> None:
    rewrite(patched / "memopt.json", edit)
    assert words in failed(patched)["weights.manifest"].detail


@pytest.mark.parametrize("name", ["logits", "logits_per_image", "loss"])
def test_no_recipe_excuses_what_a_model_computes(patched: Path, name: str) -> None:
    def excuse(manifest: dict[str, Any]) -> None:
        manifest["recipe"]["norms"]["hidden_states"] = "change"
        manifest["changed_outputs"] = [name]

    rewrite(patched / "memopt.json", excuse)
    assert f"may change {name}" in failed(patched)["weights.manifest"].detail


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda c: c.pop("memopt"), "config.json has no key 'memopt'"),
        (lambda c: c.update(memopt=7), "config.json has no key 'memopt'"),
        (lambda c: c["memopt"].update(schema_version=9), "memopt.schema_version: 9 instead of"),
        (lambda c: c["memopt"].update(folded_norms=[]), "memopt.folded_norms"),
        (lambda c: c["memopt"].update(affines="0"), "memopt.affines"),
        (lambda c: c["memopt"].update(extra=1), "memopt.extra: added"),
    ],
)
def test_a_key_that_is_not_the_manifests_fails(
    patched: Path, edit: Callable[[dict[str, Any]], object], words: str
) -> None:
    rewrite(patched / "config.json", edit)
    forge(patched, "config.json")
    found = failed(patched)
    assert set(found) == {"weights.manifest"}
    assert words in found["weights.manifest"].detail


def test_an_output_may_change_only_where_a_fold_of_the_recipe_changes_it(folders: Path) -> None:
    reaches = tuple(Reach("model output", name, "", auxiliary=True) for name in ("hidden", "logits"))
    sites = plan_of([rms_norm(0, reaches=reaches), rms_norm(1)]).sites
    listed = ("hidden", "logits", "other")
    kept = dataclasses.replace(read_manifest(folders / "patched"), changed_outputs=listed)
    changed = dataclasses.replace(kept, recipe=load_recipe(kept.recipe, ["norms.hidden_states=change"]))
    assert allowed_changes(changed, sites) == {"hidden"}
    assert allowed_changes(dataclasses.replace(changed, changed_outputs=()), sites) == frozenset()
    assert allowed_changes(dataclasses.replace(changed, entries=changed.entries[1:]), sites) == frozenset()
    assert allowed_changes(kept, sites) == frozenset()


def test_without_the_source_everything_else_is_still_checked(folders: Path, patched: Path, tmp_path: Path) -> None:
    rewrite(patched / "memopt.json", lambda manifest: manifest["source"].update(path=str(tmp_path / "source")))
    statuses = {check.id: check.status for check in verify_weights(patched)}
    assert statuses == {
        "weights.files": "pass",
        "weights.headers": "pass",
        "weights.manifest": "pass",
        "weights.source": "skip",
        "weights.fold": "skip",
    }
    rewrite(patched / "config.json", lambda config: config["memopt"].update(folds="0"))
    assert set(failed(patched)) == {"weights.files", "weights.manifest"}


@pytest.mark.parametrize(
    "edit",
    [
        lambda manifest: manifest.update(schema_version=2),
        lambda manifest: manifest.update(schema_version=0),
        lambda manifest: manifest.pop("folds"),
        lambda manifest: manifest.pop("notes"),
        lambda manifest: manifest.update(planted=1),
        lambda manifest: manifest["source"].update(planted=1),
        lambda manifest: manifest["files"].update({"../outside": {"sha256": "", "size": 1}}),
        lambda manifest: manifest["source"]["files"].update({"/etc/passwd": {"sha256": "", "size": 1}}),
    ],
)
def test_a_damaged_manifest_is_a_failed_check(patched: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    rewrite(patched / "memopt.json", edit)
    verdict = verify(patched)
    assert [(check.id, check.status) for check in verdict.checks] == [("weights.manifest", "fail")]
    assert verdict.exit_code() == 1
    assert "memopt.json" in verdict.checks[0].detail


def test_a_manifest_nested_beyond_all_bounds_is_a_failed_check(patched: Path) -> None:
    (patched / "memopt.json").write_text("[" * 100_000)
    assert verify(patched, level="weights").exit_code() == 1
