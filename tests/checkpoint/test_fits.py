"""A patched folder whose files are not those of its memopt.json is refused before it is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import memopt
from memopt.checkpoint.sources.source import open_source
from memopt.checkpoint.writer import write_checkpoint
from memopt.errors import ModelError
from memopt.patches.checks import Check
from memopt.verification.weights import verify_weights
from tests.checkpoint.builders import rms_plan, rms_tensors, write_checkpoint_files
from tests.factories import tiny_model

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fits")
    tiny_model("llama").save_pretrained(root / "model")
    return memopt.patch_checkpoint(root / "model", root / "patched").out


@pytest.fixture
def patched(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "patched"))


def edit(path: Path, change: Callable[[Any], None]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def test_what_patch_wrote_is_loaded(patched: Path) -> None:
    assert memopt.summary(memopt.load(patched, verify=True)).modules > 0


NORM = "model.layers.0.input_layernorm"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d["folds"][0]["fold"].update(weight="model.nowhere.weight"), "model.nowhere.weight"),
        (lambda d: d["folds"].pop(), "folds that differ from config.json's"),
        (lambda d: d["folds"].append(d["folds"][0]), "folds that differ"),
        (lambda d: d["folds"][0]["fold"].update(norm="model.nowhere"), "folds that differ"),
    ],
    ids=["a norm that is not there", "one less", "one twice", "another name"],
)
def test_a_list_of_folds_that_is_not_that_of_the_files(
    patched: Path, change: Callable[[Any], None], words: str
) -> None:
    edit(patched / "memopt.json", change)
    with pytest.raises(ModelError, match=words):
        memopt.load(patched)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(f"{NORM}.weight"), NORM),
        (lambda t: t.update({f"{NORM}.weight": torch.ones(3)}), "fold that the tensors do not allow"),
        (lambda t: t.pop("model.layers.0.mlp.down_proj.weight"), "down_proj.weight is missing"),
        (lambda t: t.update({"model.extra.weight": torch.ones(3)}), "extra.weight is not in the model"),
        (lambda t: t.update({"model.layers.1.mlp.down_proj.weight": torch.ones(3, 5)}), "in the files and"),
    ],
    ids=["no norm", "a norm of another shape", "a weight less", "a weight more", "another shape"],
)
def test_weights_that_were_replaced_by_others(
    patched: Path, change: Callable[[dict[str, torch.Tensor]], None], words: str
) -> None:
    edit_weights(patched, change)
    with pytest.raises(ModelError, match=words):
        memopt.load(patched)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda f: edit_weights(f, lambda t: t["lm_head.weight" if "lm_head.weight" in t else min(t)].add_(1)),
            WEIGHTS,
        ),
        (lambda f: (f / "generation_config.json").write_text("{}"), "generation_config.json"),
        (lambda f: (f / "generation_config.json").unlink(), "generation_config.json is missing"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer.json was added"),
        (lambda f: edit(f / "config.json", lambda c: c.update(rms_norm_eps=0.5)), "config.json"),
    ],
    ids=["values", "a side file", "a file less", "a file more", "config"],
)
def test_digests_are_compared_where_asked(patched: Path, change: Callable[[Path], None], words: str) -> None:
    change(patched)
    memopt.load(patched)
    with pytest.raises(ModelError, match=words):
        memopt.load(patched, verify=True)


def test_a_folder_that_was_saved_again_has_no_digests(patched: Path, tmp_path: Path) -> None:
    memopt.load(patched).save_pretrained(tmp_path / "trained")
    memopt.load(tmp_path / "trained")
    with pytest.raises(ModelError, match="no digests"):
        memopt.load(tmp_path / "trained", verify=True)


def found(folder: Path, against: Path | None = None) -> Check:
    checks = verify_weights(folder, None if against is None else str(against))
    return next(check for check in checks if check.id == "weights.source_files")


def test_the_sources_config_and_tokenizer_are_pinned(tmp_path: Path) -> None:
    source = write_checkpoint_files(tmp_path / "model", rms_tensors(layers=1))
    out = write_checkpoint(open_source(str(source)), rms_plan(1), tmp_path / "out").out
    assert (found(out).status, found(out).n) == ("pass", 3)
    shutil.copytree(source, tmp_path / "other")
    for folder in (source, tmp_path / "other"):
        (folder / "tokenizer.json").write_text('{"version": "2.0"}')
        edit(folder / "config.json", lambda config: config.update(hidden_size=1))
    assert found(out).status == "skip"
    assert "config.json, tokenizer.json changed" in found(out).detail
    assert found(out, tmp_path / "other").status == "warn"
