"""Checkpoints in torch's pickle format, with --allow-pickle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from memopt.checkpoint.sources.source import open_source
from memopt.checkpoint.writer import write_checkpoint
from memopt.errors import ModelError
from tests.checkpoint.builders import rms_plan, rms_tensors, write_checkpoint_files
from tests.checkpoint.folding import fold_weight


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = write_checkpoint_files(tmp_path / "model", {})
    (folder / "model.safetensors").unlink()
    return folder


def save_sharded(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    names = sorted(tensors)
    weight_map = {name: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        torch.save({name: tensors[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_a_pickle_becomes_a_folded_safetensors_file(tmp_path: Path, folder: Path) -> None:
    tensors = rms_tensors() | {"model.position_ids": torch.arange(5)}
    torch.save(tensors, folder / "pytorch_model.bin")
    result = write_checkpoint(open_source(str(folder), allow_pickle=True), rms_plan(), tmp_path / "out")
    got = load_file(result.out / "model.safetensors")
    assert got.keys() == tensors.keys()
    weight, gamma = tensors["model.layers.0.q.weight"], tensors["model.layers.0.norm.weight"]
    assert torch.equal(got["model.layers.0.q.weight"], fold_weight(weight, gamma))
    assert torch.equal(got["model.embed.weight"], tensors["model.embed.weight"])
    assert not list(result.out.glob("*.bin"))


def test_sharded_pickles_become_sharded_safetensors_with_an_index(tmp_path: Path, folder: Path) -> None:
    tensors = rms_tensors()
    save_sharded(folder, tensors)
    result = write_checkpoint(open_source(str(folder), allow_pickle=True), rms_plan(), tmp_path / "out")
    assert {path.name for path in result.out.glob("*.safetensors*")} == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    }
    written = open_source(str(result.out))
    assert written.tensors.keys() == tensors.keys()
    name = "model.layers.1.out.weight"
    assert torch.equal(written.read(name), tensors[name])
    index = json.loads((result.out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())


def test_views_and_transposes_are_written_as_what_they_show(tmp_path: Path, folder: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    torch.save({"t": base.T, "part": base[1:, 2:], "one": base[0, 0]}, folder / "pytorch_model.bin")
    result = write_checkpoint(open_source(str(folder), allow_pickle=True), rms_plan(0), tmp_path / "out")
    got = load_file(result.out / "model.safetensors")
    assert torch.equal(got["t"], base.T)
    assert torch.equal(got["part"], base[1:, 2:])
    assert got["one"].shape == ()


def test_tied_tensors_are_written_twice_and_never_folded(tmp_path: Path, folder: Path) -> None:
    tensors = rms_tensors()
    tensors["lm_head.weight"] = tensors["model.layers.0.q.weight"]
    torch.save(tensors, folder / "pytorch_model.bin")
    result = write_checkpoint(open_source(str(folder), allow_pickle=True), rms_plan(), tmp_path / "out")
    got = load_file(result.out / "model.safetensors")
    assert torch.equal(got["lm_head.weight"], tensors["lm_head.weight"])
    assert torch.equal(got["model.layers.0.q.weight"], tensors["lm_head.weight"])
    assert result.manifest.folded_norms() == {"model.layers.1.norm"}


def test_the_format_before_torch_1_6_is_read_too(tmp_path: Path, folder: Path) -> None:
    tensors = rms_tensors()
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    source = open_source(str(folder), allow_pickle=True)
    assert torch.equal(source.read("model.embed.weight"), tensors["model.embed.weight"])


class Malicious:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (print, ("code was run",))


def test_a_pickle_that_runs_code_is_refused_and_not_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"x": Malicious()}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="runs code when it is opened"):
        open_source(str(folder), allow_pickle=True)
    assert "code was run" not in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"not a pickle", b"PK\x03\x04 truncated"])
def test_a_damaged_pickle_is_named(folder: Path, content: bytes) -> None:
    (folder / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(ModelError, match=r"pytorch_model\.bin"):
        open_source(str(folder), allow_pickle=True)


@pytest.mark.parametrize("content", [[1], {"x": 3}, {"x": torch.ones(2, 2).to_sparse()}])
def test_what_is_no_state_dict_is_refused(folder: Path, content: object) -> None:
    torch.save(content, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"state dict|not a plain tensor"):
        open_source(str(folder), allow_pickle=True)


def test_a_missing_pickle_shard_is_named(folder: Path) -> None:
    save_sharded(folder, rms_tensors())
    (folder / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(ModelError, match="00002-of-00002"):
        open_source(str(folder), allow_pickle=True)
