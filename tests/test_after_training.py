"""A folder that `save_pretrained` wrote after training: what load, report, verify and patch make of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import memopt
from memopt.errors import ModelError, NegativeVerdict
from memopt.patches.record import record_of
from memopt.pipeline import patch_checkpoint, report
from memopt.verification.run import verify
from tests.factories import tiny_inputs, tiny_model

#: Settings that only the whole recipe in the config's key brings back.
SETTINGS = ("ignore=[model.layers.1.mlp]", "activations.method=none")


def train(folder: Path, out: Path, name: str) -> None:
    """One step of SGD on every parameter, saved as any training loop does."""
    model = memopt.load(folder).train()
    model(**tiny_inputs(name, 2, 16)).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.save_pretrained(out)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`original`, `patched` and `trained` of a tiny Llama whose last norm, which nothing folds, is the identity."""
    root = tmp_path_factory.mktemp("after_training")
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.norm.weight.fill_(1.0)
    model.save_pretrained(root / "original")
    patch_checkpoint(root / "original", root / "patched", overrides=SETTINGS)
    train(root / "patched", root / "trained", "llama")
    return root


@pytest.fixture
def trained(folders: Path, tmp_path: Path) -> Path:
    """A copy of the trained folder that a test may change."""
    return Path(shutil.copytree(folders / "trained", tmp_path / "trained"))


def test_it_loads_with_its_own_recipe_and_freezes_folded_norms_only(folders: Path) -> None:
    assert not (folders / "trained" / "memopt.json").exists()
    model = memopt.load(folders / "trained")
    record = record_of(model)
    assert record is not None
    assert record.plan.recipe.ignore == ("model.layers.1.mlp",)  # type: ignore[attr-defined]
    assert "model.layers.0.input_layernorm.weight" in dict(model.named_buffers())
    assert "model.norm.weight" in dict(model.named_parameters())


def test_an_untrained_identity_that_no_fold_made_stays_trainable(folders: Path, tmp_path: Path) -> None:
    memopt.load(folders / "patched").save_pretrained(tmp_path)
    model = memopt.load(tmp_path)
    assert bool((model.model.norm.weight == 1).all())
    assert "model.norm.weight" in dict(model.named_parameters())


def test_report_says_the_same_as_of_the_patched_folder(folders: Path) -> None:
    trained, patched = (report(folders / name, seq=16) for name in ("trained", "patched"))
    assert (trained.recipe, trained.after.total) == (patched.recipe, patched.after.total)
    assert trained.after.total < trained.before.total


def test_verify_checks_what_can_be_checked_and_says_what_cannot(folders: Path) -> None:
    verdict = verify(folders / "trained", against=folders / "original")
    assert verdict.exit_code() == 3
    by_status = {
        status: {check.id for check in verdict.checks if check.status == status} for status in ("pass", "skip", "fail")
    }
    assert by_status["skip"] == {"weights.trained", "forward.original"}
    assert by_status["fail"] == set()
    assert {check.level for check in verdict.checks if check.status == "pass"} == {"weights", "gradient", "memory"}
    assert any("memopt unpatch" in check.detail for check in verdict.checks)


def test_verify_names_values_of_the_config_that_are_not_the_originals(folders: Path, trained: Path) -> None:
    config = json.loads((trained / "config.json").read_text())
    config["rms_norm_eps"] = 1e-3
    (trained / "config.json").write_text(json.dumps(config))
    warned = [c for c in verify(trained, against=folders / "original", level="weights").checks if c.status == "warn"]
    assert [(check.id, "rms_norm_eps" in check.detail) for check in warned] == [("weights.config", True)]


def test_patching_it_names_the_way_out(folders: Path, tmp_path: Path) -> None:
    with pytest.raises(NegativeVerdict, match=r"already patched.*memopt unpatch .*trained --against original"):
        patch_checkpoint(folders / "trained", tmp_path / "out")


def test_a_model_saved_into_the_patched_folder_fails_and_says_how_to_go_on(folders: Path, tmp_path: Path) -> None:
    over = Path(shutil.copytree(folders / "patched", tmp_path / "over"))
    train(over, over, "llama")
    (files,) = (check for check in verify(over, level="weights").checks if check.id == "weights.files")
    assert files.status == "fail"
    assert "remove memopt.json" in files.detail
    (over / "memopt.json").unlink()
    assert verify(over, level="weights").exit_code() == 3


def test_a_folder_whose_key_was_removed_still_loads_and_fails(folders: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders / "patched", tmp_path / "resaved"))
    config = json.loads((folder / "config.json").read_text())
    del config["memopt"]
    (folder / "config.json").write_text(json.dumps(config))
    assert "model.layers.0.input_layernorm.weight" in dict(memopt.load(folder).named_buffers())
    failed = {check.id for check in verify(folder, level="weights").checks if check.status == "fail"}
    assert failed == {"weights.files", "weights.manifest"}
    with pytest.raises(NegativeVerdict, match="already patched"):
        patch_checkpoint(folder, tmp_path / "out")


@pytest.mark.parametrize("value", [None, 3, {}, {"schema_version": 1}, {"recipe": "exact", "folded_norms": 4}])
def test_a_damaged_key_is_named(trained: Path, value: object) -> None:
    config = json.loads((trained / "config.json").read_text())
    (trained / "config.json").write_text(json.dumps(config | {"memopt": value}))
    with pytest.raises(ModelError, match=r"key 'memopt' in config\.json"):
        memopt.load(trained)
    verdict = verify(trained, level="weights")
    assert [(check.id, check.status) for check in verdict.checks] == [("weights.manifest", "fail")]
