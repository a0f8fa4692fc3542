"""Verify names what the files lack or have beside the config's model; no tensor that was drawn at random judges."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from memopt.checkpoint.patched import PatchedFolder, patched_folder
from memopt.checkpoint.sources.source import sha256
from memopt.pipeline import patch_checkpoint
from memopt.plan.recipe import load_recipe
from memopt.verification import models
from memopt.verification.run import verify
from memopt.verification.side_files import random_tensors, verify_names
from tests.checkpoint.test_names import FILE, NORM, bert, configure
from tests.factories import tiny_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source and the folder that was patched from it."""
    root = tmp_path_factory.mktemp("names")
    tiny_model("llama", torch.bfloat16).save_pretrained(root / "source")
    patch_checkpoint(root / "source", root / "patched")
    return root


@pytest.fixture
def without_a_norm(folders: Path, tmp_path: Path) -> Path:
    """Both without the last norm, and a manifest that knows no better: they agree with each other."""
    root = Path(shutil.copytree(folders, tmp_path / "both"))
    for folder in (root / "source", root / "patched"):
        tensors = load_file(folder / FILE)
        del tensors[NORM]
        save_file(tensors, folder / FILE, metadata={"format": "pt"})
    path = root / "patched" / "memopt.json"
    manifest = json.loads(path.read_text())
    manifest["source"]["path"] = str(root / "source")
    for files, folder in ((manifest["files"], "patched"), (manifest["source"]["files"], "source")):
        files[FILE] = {"sha256": sha256(root / folder / FILE), "size": (root / folder / FILE).stat().st_size}
    path.write_text(json.dumps(manifest))
    return root


def test_a_right_folder_has_the_names_of_its_model(folders: Path) -> None:
    checks = {check.id: check for check in verify(folders / "patched", level="weights").checks}
    assert {check.status for check in checks.values()} == {"pass"}
    assert checks["weights.names"].subject == "LlamaForCausalLM"


def test_what_patched_and_source_both_lack_fails_with_its_name(without_a_norm: Path) -> None:
    failed = [check for check in verify(without_a_norm / "patched", level="weights").checks if check.status == "fail"]
    assert [(check.id, check.value) for check in failed] == [("weights.names", 1)]
    assert f"{NORM} is missing" in failed[0].detail


def test_no_model_with_a_random_tensor_is_run(without_a_norm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "load_stock", None)
    monkeypatch.setattr(models, "load_patched", None)
    checks = verify(without_a_norm / "patched", level=("forward", "gradient")).checks
    assert [(check.id, check.status) for check in checks] == [
        ("forward.names", "fail"), ("forward.names", "fail"), ("gradient.names", "fail"),
    ]  # fmt: skip
    assert all(NORM in check.detail for check in checks)


def record_of(folder: Path) -> PatchedFolder:
    return PatchedFolder(folder, None, None, load_recipe("exact"))


def test_a_head_that_would_be_drawn_at_random_skips_the_levels_that_need_it(tmp_path: Path) -> None:
    folder = configure(bert(tmp_path / "head", "BertModel"), architectures=None)
    assert verify_names(folder).status == "warn"
    tiny_model("bert").save_pretrained(with_head := tmp_path / "whole")
    assert [check.status for check in random_tensors("forward", record_of(folder), False)] == ["skip"]
    assert random_tensors("forward", record_of(with_head), False) == []


def test_the_original_is_looked_at_as_well(folders: Path, without_a_norm: Path) -> None:
    original = str(without_a_norm / "source")
    checks = random_tensors("forward", patched_folder(folders / "patched"), False, original)
    assert [(check.status, check.subject) for check in checks] == [("fail", original)]
