"""Level "weights": what is right passes, and every single wrong thing is found."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from memopt.checkpoint import shards, writer
from memopt.checkpoint.fold import FoldPlan, Operation, Scale
from memopt.checkpoint.sources.source import open_source, sha256
from memopt.checkpoint.writer import write_checkpoint
from memopt.errors import ModelError
from memopt.patches.checks import Check
from memopt.verification import recompute
from memopt.verification.run import Verdict
from memopt.verification.weights import verify_weights
from memopt.walk.sites import Consumer
from tests.checkpoint.builders import HIDDEN, plan_of, rms_norm, rms_plan, rms_tensors, write_checkpoint_files

FILE = "model.safetensors"


def write(model: Path) -> Path:
    return write_checkpoint(open_source(str(model)), rms_plan(), model.parent / "out").out


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_checkpoint_files(tmp_path / "model", rms_tensors())


@pytest.fixture
def patched(model: Path) -> Path:
    return write(model)


def by_id(checks: list[Check], status: str) -> set[str]:
    return {check.id for check in checks if check.status == status}


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Edit the weights and forge the manifest's digest, so that only the comparison can notice."""
    tensors = load_file(folder / FILE)
    edit(tensors)
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    path = folder / "memopt.json"
    manifest = json.loads(path.read_text())
    manifest["files"][FILE] = {"sha256": sha256(folder / FILE), "size": (folder / FILE).stat().st_size}
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shards_count", [1, 3])
def test_what_patch_writes_passes(tmp_path: Path, dtype: torch.dtype, shards_count: int) -> None:
    patched = write(write_checkpoint_files(tmp_path / "model", rms_tensors(dtype), shards=shards_count))
    checks = verify_weights(patched)
    assert {check.status for check in checks} == {"pass"}
    assert {c.subject for c in checks if c.id == "weights.fold"} == {"model.layers.0.norm", "model.layers.1.norm"}
    assert Verdict(checks).exit_code() == 0


def layer_norm_model(folder: Path, dtype: torch.dtype) -> tuple[Path, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    shapes = {"n.weight": (HIDDEN,), "n.bias": (HIDDEN,), "c.weight": (HIDDEN, 40), "c.bias": (40,),
              "e.weight": (3, 8, HIDDEN), "e.bias": (3, 8), "k.weight": (5, HIDDEN, 3, 3), "k.bias": (5,)}  # fmt: skip
    tensors = {name: torch.randn(*shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    return write_checkpoint_files(folder, tensors), tensors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_layer_norm_folds_into_every_layout_pass_and_block_sizes_do_not_matter(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = layer_norm_model(tmp_path / "model", dtype)
    axes = {"c": 0, "e": 2, "k": 1}
    consumers = tuple(Consumer(f"{n}.weight", n, axis=a, bias=f"{n}.bias", scale=0.3) for n, a in axes.items())
    norm = rms_norm(0, kind="layer", weight="n.weight", bias="n.bias", offset=1, consumers=consumers)
    with monkeypatch.context() as patched:
        patched.setattr(shards, "BLOCK", 200)
        out = write_checkpoint(open_source(str(model)), plan_of([norm]), tmp_path / "out").out
    monkeypatch.setattr(recompute, "_SCALE_BLOCK", 77)
    monkeypatch.setattr(recompute, "_SUM_BLOCK", 99)
    assert by_id(verify_weights(out), "pass") >= {"weights.fold", "weights.unchanged", "weights.range"}
    assert Verdict(verify_weights(out)).status == "pass"


@pytest.mark.parametrize("tiny", [2.0**-40, 2.0**-29])
def test_a_bias_whose_tie_is_decided_far_below_passes(tmp_path: Path, tiny: float) -> None:
    tensors = {
        "n.weight": torch.ones(2),
        "n.bias": torch.tensor([1.0, tiny]),
        "w": torch.tensor([[2.0**-8, tiny], [2.0**-8, -tiny]]),
        "b": torch.ones(2),
    }
    model = write_checkpoint_files(tmp_path / "model", {name: t.bfloat16() for name, t in tensors.items()})
    consumer = Consumer("w", "w", axis=1, bias="b")
    norm = rms_norm(0, hidden_size=2, kind="layer", weight="n.weight", bias="n.bias", consumers=(consumer,))
    out = write_checkpoint(open_source(str(model)), plan_of([norm]), tmp_path / "out").out
    assert load_file(out / FILE)["b"].tolist() == [1 + 2**-7, 1.0]
    assert Verdict(verify_weights(out)).status == "pass"


@pytest.mark.parametrize("name", ["q.weight", "up.weight", "norm.weight"])
def test_a_fold_that_skips_one_tensor_is_found(model: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    operations = FoldPlan.operations

    def forgetful(folds: FoldPlan) -> dict[str, Operation]:
        found = operations(folds)
        del found[f"model.layers.0.{name}"]
        return found

    monkeypatch.setattr(FoldPlan, "operations", forgetful)
    patched = write(model)
    monkeypatch.undo()
    failed = [check for check in verify_weights(patched) if check.status == "fail"]
    assert [(check.id, check.subject) for check in failed] == [("weights.fold", "model.layers.0.norm")]
    assert name in failed[0].detail


def test_a_fold_with_the_wrong_offset_is_found(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operations = FoldPlan.operations

    def wrong(folds: FoldPlan) -> dict[str, Operation]:
        return {
            name: Scale(op.axis, tuple(dataclasses.replace(part, offset=1) for part in op.parts))
            if isinstance(op, Scale) else op
            for name, op in operations(folds).items()
        }  # fmt: skip

    monkeypatch.setattr(FoldPlan, "operations", wrong)
    patched = write(model)
    monkeypatch.undo()
    assert by_id(verify_weights(patched), "fail") == {"weights.fold"}


def test_a_fold_along_the_wrong_axis_is_found(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = shards.arithmetic.Scaler.__call__

    def along_rows(scaler: shards.arithmetic.Scaler, block: Any, columns: slice, out: Any) -> None:
        swap = block.shape[0] == block.shape[1]
        turned = (block.swapaxes(0, 1), columns, out.swapaxes(0, 1)) if swap else (block, columns, out)
        original(scaler, *turned)

    monkeypatch.setattr(shards.arithmetic.Scaler, "__call__", along_rows)
    patched = write(model)
    monkeypatch.undo()
    assert by_id(verify_weights(patched), "fail") == {"weights.fold"}


def test_one_bit_in_a_folded_tensor_is_found(patched: Path) -> None:
    def flip(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.q.weight"].view(torch.int16)[3, 4] ^= 1

    change(patched, flip)
    failed = [check for check in verify_weights(patched) if check.status == "fail"]
    assert [(check.id, check.subject, check.value) for check in failed] == [("weights.fold", "model.layers.1.norm", 1)]


def test_one_bit_in_any_other_tensor_is_found(patched: Path) -> None:
    def flip(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed.weight"].view(torch.int16)[0, 0] ^= 1

    change(patched, flip)
    failed = [check for check in verify_weights(patched) if check.status == "fail"]
    assert [check.id for check in failed] == ["weights.unchanged"]
    assert "model.embed.weight" in failed[0].detail


def test_a_sign_of_zero_counts(patched: Path) -> None:
    def negate(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.q.weight"][0, 0] = -tensors["model.layers.0.q.weight"][0, 0]

    change(patched, negate)
    assert by_id(verify_weights(patched), "fail") == {"weights.fold"}


def test_a_new_infinity_is_counted(patched: Path) -> None:
    def overflow(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.q.weight"][0, 0] = float("inf")

    change(patched, overflow)
    assert by_id(verify_weights(patched), "fail") == {"weights.fold", "weights.range"}


@pytest.mark.parametrize(
    "edit",
    [
        lambda tensors: tensors.pop("model.embed.weight"),
        lambda tensors: tensors.update(extra=torch.ones(1)),
        lambda tensors: tensors.update({"model.embed.weight": tensors["model.embed.weight"].float()}),
        lambda tensors: tensors.update({"model.embed.weight": tensors["model.embed.weight"].T.contiguous()}),
    ],
    ids=["missing", "extra", "dtype", "shape"],
)
def test_a_tensor_that_is_missing_extra_or_different_is_found(
    patched: Path, edit: Callable[[dict[str, torch.Tensor]], None]
) -> None:
    change(patched, edit)
    assert by_id(verify_weights(patched), "fail") == {"weights.tensors"}


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", FILE])
def test_a_file_that_was_changed_is_found(patched: Path, name: str) -> None:
    with (patched / name).open("r+b") as file:
        file.seek(-1, 2)
        file.write(b" ")
    checks = verify_weights(patched)
    assert "weights.files" in by_id(checks, "fail")
    assert name in checks[0].detail


def test_a_file_that_is_missing_is_found(patched: Path) -> None:
    (patched / "tokenizer.json").unlink()
    assert by_id(verify_weights(patched), "fail") == {"weights.files", "weights.side_files"}


def test_a_truncated_shard_is_a_failed_check_not_an_error(patched: Path) -> None:
    (patched / FILE).write_bytes((patched / FILE).read_bytes()[:-1])
    assert by_id(verify_weights(patched), "fail") == {"weights.files", "weights.headers"}


def test_a_source_that_is_gone_skips_the_comparison_with_a_hint(model: Path, patched: Path) -> None:
    shutil.rmtree(model)
    checks = verify_weights(patched)
    assert by_id(checks, "skip") == {"weights.source", "weights.fold"}
    assert any("--against" in check.detail for check in checks)
    assert Verdict(checks).exit_code() == 3


def test_a_source_that_moved_is_found_with_against(tmp_path: Path, model: Path, patched: Path) -> None:
    model.rename(tmp_path / "moved")
    assert Verdict(verify_weights(patched, str(tmp_path / "moved"))).status == "pass"


def test_a_source_that_changed_since_is_not_compared_with(model: Path, patched: Path) -> None:
    tensors = load_file(model / FILE)
    tensors["model.embed.weight"] += 1
    save_file(tensors, model / FILE, metadata={"format": "pt"})
    checks = verify_weights(patched)
    assert by_id(checks, "skip") == {"weights.source", "weights.fold"}
    assert by_id(verify_weights(patched, str(model)), "fail") == {"weights.unchanged"}


def test_a_source_in_other_shards_has_the_same_tensors(tmp_path: Path, patched: Path) -> None:
    other = write_checkpoint_files(tmp_path / "other", rms_tensors(), shards=2)
    checks = verify_weights(patched, str(other))
    assert by_id(checks, "warn") == {"weights.source"}
    assert Verdict(checks).status == "pass"


def test_against_something_that_does_not_exist_is_an_error(patched: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        verify_weights(patched, "./nowhere")


def test_a_folder_that_was_not_patched_is_an_error(model: Path) -> None:
    with pytest.raises(ModelError, match="memopt patch"):
        verify_weights(model)


def test_a_manifest_that_folds_unknown_tensors_fails(patched: Path) -> None:
    path = patched / "memopt.json"
    path.write_text(path.read_text().replace("model.layers.0.q.weight", "model.layers.0.z.weight"))
    assert by_id(verify_weights(patched), "fail") == {"weights.fold", "weights.manifest"}


def test_folds_that_the_manifest_does_not_list_are_found(patched: Path) -> None:
    path = patched / "memopt.json"
    manifest = json.loads(path.read_text())
    manifest["folds"] = manifest["folds"][:1]
    path.write_text(json.dumps(manifest))
    # The card says how many norms are folded.
    failed = {"weights.manifest", "weights.unchanged", "weights.side_files"}
    assert by_id(verify_weights(patched), "fail") == failed


def test_a_checkpoint_without_folds_is_compared_byte_by_byte(model: Path) -> None:
    plan = plan_of([rms_norm(0)], "norms.fold=none")
    out = writer.write_checkpoint(open_source(str(model)), plan, model.parent / "out").out
    checks = verify_weights(out)
    assert {check.status for check in checks} == {"pass"}
    assert next(check for check in checks if check.id == "weights.unchanged").n == len(rms_tensors())


def test_a_patched_pickle_is_compared_with_the_pickle(tmp_path: Path, model: Path) -> None:
    (model / FILE).unlink()
    torch.save(rms_tensors(), model / "pytorch_model.bin")
    source = open_source(str(model), allow_pickle=True)
    out = write_checkpoint(source, rms_plan(), tmp_path / "out").out
    assert Verdict(verify_weights(out)).status == "pass"
