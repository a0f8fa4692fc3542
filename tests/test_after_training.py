"""A folder that `save_pretrained` wrote after training: what load, report, verify and patch make of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import memopt
from memopt.cli.main import main
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


@pytest.mark.rotates(3)
def test_verify_checks_what_can_be_checked_and_says_what_cannot(folders: Path) -> None:
    verdict = verify(folders / "trained", against=folders / "original")
    assert verdict.exit_code() == 3
    by_status = {
        status: {check.id for check in verdict.checks if check.status == status} for status in ("pass", "skip", "fail")
    }
    assert by_status["skip"] == {"weights.trained", "forward.original"}
    assert by_status["fail"] == set()
    assert {check.level for check in verdict.checks if check.status == "pass"} == {
        "weights",
        "gradient",
        "training",
        "memory",
    }
    assert any("memopt unpatch" in check.detail for check in verdict.checks)


def test_verify_names_values_of_the_config_that_are_not_the_originals(folders: Path, trained: Path) -> None:
    config = json.loads((trained / "config.json").read_text())
    config["rms_norm_eps"] = 1e-3
    (trained / "config.json").write_text(json.dumps(config))
    warned = [c for c in verify(trained, against=folders / "original", level="weights").checks if c.status == "warn"]
    assert [(check.id, "rms_norm_eps" in check.detail) for check in warned] == [("weights.config", True)]


def test_an_entry_of_a_module_that_is_not_there_fails(folders: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders / "patched", tmp_path / "folder"))
    manifest = json.loads((folder / "memopt.json").read_text())
    manifest["entries"][-1]["site"] = "model.nowhere"
    (folder / "memopt.json").write_text(json.dumps(manifest))
    (failed,) = (check for check in verify(folder, level="weights").checks if check.status == "fail")
    assert (failed.id, failed.detail) == ("weights.sites", "the model has no model.nowhere")


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


def logits(folder: Path) -> torch.Tensor:
    """Of stock modules, in fp64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.arange(1, 40)[None]).logits
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_untrained_folder_is_unpatched_to_the_original_byte_for_byte(folders: Path, tmp_path: Path) -> None:
    result = memopt.unpatch_checkpoint(folders / "patched", out=tmp_path / "out")
    assert contents(tmp_path / "out") == contents(folders / "original")
    assert result.unfolded.computed == result.unfolded.kept == []


def test_a_trained_folder_is_unpatched_to_a_stock_one_that_computes_the_same(folders: Path, tmp_path: Path) -> None:
    result = memopt.unpatch_checkpoint(folders / "trained", folders / "original", tmp_path / "out")
    assert (len(result.unfolded.norms), result.unfolded.kept) == (4, [])
    expected, got = logits(folders / "trained"), logits(tmp_path / "out")
    # fp32 weights, each rounded once more, through a few layers.
    assert (got - expected).norm() <= 100 * torch.finfo(torch.float32).eps * expected.norm()
    original, after = (load_file(folder / "model.safetensors") for folder in (folders / "original", tmp_path / "out"))
    norm = "model.layers.0.input_layernorm.weight"
    assert torch.equal(after[norm], original[norm])
    assert not torch.equal(after["model.norm.weight"], original["model.norm.weight"])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "memopt" not in config
    assert not (tmp_path / "out" / "memopt.json").exists()


def test_what_was_unpatched_can_be_patched_again(folders: Path, tmp_path: Path) -> None:
    memopt.unpatch_checkpoint(folders / "trained", folders / "original", tmp_path / "stock")
    patch_checkpoint(tmp_path / "stock", tmp_path / "again", overrides=SETTINGS)
    assert verify(tmp_path / "again", level="weights").status == "pass"
    expected, got = logits(folders / "trained"), logits(tmp_path / "again")
    assert (got - expected).norm() <= 100 * torch.finfo(torch.float32).eps * expected.norm()


def test_a_folder_without_folds_needs_no_original(folders: Path, tmp_path: Path) -> None:
    patch_checkpoint(folders / "original", tmp_path / "patched", "exact-unfolded")
    memopt.load(tmp_path / "patched").save_pretrained(tmp_path / "saved")
    memopt.unpatch_checkpoint(tmp_path / "saved", out=tmp_path / "out")
    assert contents(tmp_path / "out")["model.safetensors"] == contents(folders / "original")["model.safetensors"]
    assert "memopt" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize("folder", ["patched", "trained"])
def test_another_model_as_the_original_is_refused(folders: Path, tmp_path: Path, folder: str) -> None:
    tiny_model("llama", seed=1).save_pretrained(tmp_path / "other")
    with pytest.raises(ModelError, match="is not the model that"):
        memopt.unpatch_checkpoint(folders / folder, tmp_path / "other", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_folds_that_cannot_be_planned_again_are_taken_from_memopt_json(folders: Path, trained: Path) -> None:
    config = json.loads((trained / "config.json").read_text())
    config["memopt"]["folds"] = "0" * 64  # as another version of memopt would have folded
    (trained / "config.json").write_text(json.dumps(config))
    out = trained.with_name("out")
    with pytest.raises(ModelError, match=r"cannot be planned again from.*memopt\.json"):
        memopt.unpatch_checkpoint(trained, folders / "original", out)
    shutil.copy(folders / "patched" / "memopt.json", trained)
    assert memopt.unpatch_checkpoint(trained, folders / "original", out).unfolded.kept == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["original"], "no memopt.json"),
        (["trained"], "--against"),
        (["trained", "--against", "patched"], "itself patched"),
        (["patched", "--out", "patched"], "--out"),
        (["patched", "--out", "original"], "not empty"),
        (["nowhere"], "does not exist"),
    ],
)
def test_what_cannot_be_unpatched_is_one_sentence(
    folders: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(folders)
    before = sorted(path.name for path in folders.iterdir())
    first, *rest = arguments
    assert main(["unpatch", f"./{first}", *rest]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert words in captured.err
    assert sorted(path.name for path in folders.iterdir()) == before


def test_the_command_exits_with_one_and_names_what_keeps_its_fold(
    folders: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = load_file(trained / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.ones(1, 64)  # as if another class had saved it
    save_file(tensors, trained / "model.safetensors", metadata={"format": "pt"})
    out = trained.with_name("out")
    arguments = ["unpatch", str(trained), "--against", str(folders / "original"), "--out"]
    assert main([*arguments, str(out)]) == 1
    text = capsys.readouterr().out
    assert "3 folds taken back" in text
    assert "model.layers.0.input_layernorm" in text
    assert main([*arguments, f"{out}-json", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["command"], document["status"]) == ("unpatch", "fail")
    assert [norm for norm, _ in document["kept"]] == ["model.layers.0.input_layernorm"]
