"""Writing a folded checkpoint: what changes, what does not, and nothing else."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from memopt.checkpoint import shards, writer
from memopt.checkpoint.manifest import read_manifest
from memopt.checkpoint.sources.source import open_source, sha256
from memopt.checkpoint.writer import WriteResult, write_checkpoint
from memopt.errors import NegativeVerdict
from memopt.plan.plan import Plan
from memopt.walk.sites import Consumer
from tests.checkpoint.builders import HIDDEN, plan_of, rms_norm, rms_plan, rms_tensors, write_checkpoint_files
from tests.checkpoint.folding import fold_bias, fold_weight

Tensors = dict[str, torch.Tensor]


def rewrite(folder: Path, plan: Plan | None = None, **options: object) -> tuple[WriteResult, Tensors]:
    result = write_checkpoint(open_source(str(folder)), plan or rms_plan(), folder.parent / "out", **options)  # type: ignore[arg-type]
    return result, load(result.out)


def load(folder: Path) -> Tensors:
    found: Tensors = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


@pytest.mark.parametrize("shards_count", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_tensor_of_a_folded_checkpoint_is_what_it_must_be(
    tmp_path: Path, dtype: torch.dtype, shards_count: int
) -> None:
    tensors = rms_tensors(dtype)
    _, got = rewrite(write_checkpoint_files(tmp_path / "model", tensors, shards=shards_count))
    expected = dict(tensors)
    for i in range(2):
        gamma = tensors[f"model.layers.{i}.norm.weight"]
        expected[f"model.layers.{i}.norm.weight"] = torch.ones_like(gamma)
        for name in (f"model.layers.{i}.q.weight", f"model.layers.{i}.up.weight"):
            expected[name] = fold_weight(tensors[name], gamma)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor), name


def test_a_layer_norm_folds_into_transposed_expert_and_convolution_weights(tmp_path: Path) -> None:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    generator = torch.Generator().manual_seed(3)
    tensors = {"n.weight": random(HIDDEN), "n.bias": random(HIDDEN)}
    shapes = {
        "conv1d": ((HIDDEN, 40), 0, (40,)),
        "experts": ((3, 40, HIDDEN), 2, (3, 40)),
        "experts_t": ((3, HIDDEN, 9), 1, (3, 9)),
        "conv2d": ((5, HIDDEN, 3, 3), 1, (5,)),
    }
    consumers = []
    for name, (shape, axis, bias) in shapes.items():
        tensors |= {f"{name}.weight": random(*shape), f"{name}.bias": random(*bias)}
        consumers.append(Consumer(f"{name}.weight", name, axis=axis, bias=f"{name}.bias"))
    norm = rms_norm(0, kind="layer", weight="n.weight", bias="n.bias", consumers=tuple(consumers))
    _, got = rewrite(write_checkpoint_files(tmp_path / "model", tensors), plan_of([norm]))
    assert torch.equal(got["n.weight"], torch.ones_like(tensors["n.weight"]))
    assert torch.equal(got["n.bias"], torch.zeros_like(tensors["n.bias"]))
    for name, (_, axis, _) in shapes.items():
        weight, bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
        assert torch.equal(got[f"{name}.weight"], fold_weight(weight, tensors["n.weight"], axis=axis)), name
        assert torch.equal(got[f"{name}.bias"], fold_bias(bias, weight, tensors["n.bias"], axis=axis)), name


def test_two_norms_on_their_own_columns_of_one_weight_both_arrive(tmp_path: Path) -> None:
    tensors = {
        "a.weight": torch.randn(2), "a.bias": torch.randn(2), "b.weight": torch.randn(2), "b.bias": torch.randn(2),
        "w": torch.randn(3, 4), "w_bias": torch.randn(3),
    }  # fmt: skip

    def norm(i: int, name: str, channels: tuple[int, ...]) -> object:
        consumer = Consumer("w", "w", axis=1, channels=channels, bias="w_bias")
        return rms_norm(i, hidden_size=2, weight=f"{name}.weight", bias=f"{name}.bias", consumers=(consumer,))

    plan = plan_of([norm(0, "a", (0, 1, -1, -1)), norm(1, "b", (-1, -1, 1, 0))])  # type: ignore[list-item]
    _, got = rewrite(write_checkpoint_files(tmp_path / "model", tensors), plan)
    x = torch.randn(5, 2, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)

    def run(weights: Tensors) -> torch.Tensor:
        a, b = (x[i] * weights[f"{n}.weight"].double() + weights[f"{n}.bias"].double() for i, n in enumerate("ab"))
        return torch.cat([a, b.flip(1)], 1) @ weights["w"].double().T + weights["w_bias"].double()

    assert torch.allclose(run(got), run(tensors), rtol=0, atol=1e-6)


def test_weights_larger_than_a_block_are_the_same_as_in_one_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = rms_tensors() | {
        "model.layers.0.norm.bias": torch.randn(HIDDEN).bfloat16(),
        "q_bias": torch.randn(HIDDEN),
    }
    consumers = (Consumer("model.layers.0.q.weight", "q", axis=0, bias="q_bias"),)
    plan = plan_of([rms_norm(0, bias="model.layers.0.norm.bias", consumers=consumers), rms_norm(1)])
    folder = write_checkpoint_files(tmp_path / "model", tensors)
    _, whole = rewrite(folder, plan)
    monkeypatch.setattr(shards, "BLOCK", 100)
    _, cut = rewrite(folder, plan, force=True)
    assert all(torch.equal(cut[name], whole[name]) for name in whole)


def test_headers_shard_names_and_index_stay_byte_for_byte(tmp_path: Path) -> None:
    folder = write_checkpoint_files(tmp_path / "model", rms_tensors(), shards=3)
    result, _ = rewrite(folder)
    before, after = open_source(str(folder)), open_source(str(result.out))
    assert [s.name for s in before.shards] == [s.name for s in after.shards]
    assert [s.header.raw for s in before.shards] == [s.header.raw for s in after.shards]
    assert before.weights.index == after.weights.index


def test_side_files_are_copied_and_other_weights_are_named_not_copied(tmp_path: Path) -> None:
    folder = write_checkpoint_files(tmp_path / "model", rms_tensors())
    for name in (
        "README.md",
        "chat_template.jinja",
        "modeling_made_up.py",
        "sub/preprocessor_config.json",
        "model.gguf",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    notes: list[str] = []
    result, _ = rewrite(folder, note=notes.append)
    copied = {path.relative_to(result.out).as_posix() for path in result.out.rglob("*") if path.is_file()}
    assert copied == {
        "LICENSE", "README.md", "chat_template.jinja", "config.json", "memopt.json", "model.safetensors",
        "modeling_made_up.py", "sub/preprocessor_config.json", "tokenizer.json",
    }  # fmt: skip
    assert any("model.gguf" in text for text in notes)


@pytest.mark.parametrize("text", ['{\n  "model_type": "x",\n  "eps": 1e-05\n}\n', '{"model_type":"ö"}', "{}"])
def test_config_keeps_its_bytes_and_gains_one_key(tmp_path: Path, text: str) -> None:
    folder = write_checkpoint_files(tmp_path / "model", rms_tensors())
    (folder / "config.json").write_text(text, encoding="utf-8")
    result, _ = rewrite(folder)
    written = (result.out / "config.json").read_text(encoding="utf-8")
    assert written.startswith(text.rstrip().rstrip("}").rstrip())
    config = json.loads(written)
    key = config.pop("memopt")
    assert config == json.loads(text)
    assert key["recipe"]["name"] == "exact"
    assert key["folded_norms"] == ["model.layers.0.norm", "model.layers.1.norm"]
    assert key["base_model"] == "model"  # no path of this machine
    assert str(tmp_path) not in written


def modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_what_is_private_in_the_source_is_private_in_the_result(tmp_path: Path, umask: None) -> None:
    folder = write_checkpoint_files(tmp_path / "model", rms_tensors(), shards=2)
    (folder / "sub").mkdir(mode=0o750)
    (folder / "sub" / "vocab.txt").touch()
    (folder / "config.json").chmod(0o600)
    for number, mode in ((1, 0o640), (2, 0o644)):
        (folder / f"model-0000{number}-of-00002.safetensors").chmod(mode)
    folder.chmod(0o700)
    result, _ = rewrite(folder)
    got = modes(result.out)
    assert (got["out"], got["sub"], got["config.json"], got["memopt.json"]) == (0o700, 0o750, 0o600, 0o600)
    assert (got["model-00001-of-00002.safetensors"], got["model-00002-of-00002.safetensors"]) == (0o640, 0o644)
    assert got["vocab.txt"] == got["LICENSE"] == 0o644


def test_an_existing_private_folder_stays_private(tmp_path: Path, umask: None) -> None:
    folder = write_checkpoint_files(tmp_path / "model", rms_tensors())
    (tmp_path / "out").mkdir(mode=0o700)
    for _ in range(2):
        result, _ = rewrite(folder, force=True)
        assert modes(result.out)["out"] == 0o700


def test_modes_follow_the_umask_where_the_source_is_open(tmp_path: Path, umask: None) -> None:
    folder = write_checkpoint_files(tmp_path / "model", rms_tensors())
    for path in folder.iterdir():
        path.chmod(0o777)
    os.umask(0o027)
    result, _ = rewrite(folder)
    assert set(modes(result.out).values()) == {0o640, 0o750}


def test_links_that_lead_out_of_the_source_are_named(tmp_path: Path) -> None:
    folder = write_checkpoint_files(tmp_path / "model", rms_tensors())
    (tmp_path / "secret").write_text("s")
    (tmp_path / "folder").mkdir()
    (folder / "notes.txt").symlink_to("../secret")
    (folder / "inside.txt").symlink_to("LICENSE")
    (folder / "more").symlink_to("../folder")
    (folder / "model.safetensors").rename(tmp_path / "weights")
    (folder / "model.safetensors").symlink_to(tmp_path / "weights")
    notes: list[str] = []
    result, _ = rewrite(folder, note=notes.append)
    assert {note.split("'")[1] for note in notes} == {"notes.txt", "more", "model.safetensors"}
    assert str(tmp_path / "secret") in " ".join(notes)
    assert not any(path.is_symlink() for path in result.out.rglob("*"))


def test_the_links_of_a_snapshot_in_the_hubs_cache_are_not_named(tmp_path: Path) -> None:
    blobs = write_checkpoint_files(tmp_path / "blobs", rms_tensors())
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    notes: list[str] = []
    write_checkpoint(open_source(str(snapshot)), rms_plan(), tmp_path / "out", note=notes.append)
    assert not notes


def test_the_output_loads_with_the_safetensors_library(tmp_path: Path) -> None:
    result, _ = rewrite(write_checkpoint_files(tmp_path / "model", rms_tensors()))
    with safe_open(result.out / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_the_manifest_lists_every_file_with_its_digest_and_every_fold(tmp_path: Path) -> None:
    folder = write_checkpoint_files(tmp_path / "model", rms_tensors(), shards=2)
    result, _ = rewrite(folder)
    manifest = read_manifest(result.out)
    files = {path.name for path in result.out.iterdir()} - {"memopt.json"}
    assert manifest.files.keys() == files
    assert all(record.sha256 == sha256(result.out / name) for name, record in manifest.files.items())
    assert all(record.sha256 == sha256(folder / name) for name, record in manifest.source.files.items())
    assert manifest.folded_norms() == {"model.layers.0.norm", "model.layers.1.norm"}
    assert manifest == result.manifest


def test_a_fold_that_would_overflow_is_refused_and_its_tensors_are_the_sources(tmp_path: Path) -> None:
    tensors = rms_tensors(torch.float16)
    tensors["model.layers.0.norm.weight"][3] = 60000.0
    notes: list[str] = []
    result, got = rewrite(write_checkpoint_files(tmp_path / "model", tensors), note=notes.append)
    untouched = [name for name in tensors if "layers.0." in name]
    assert all(torch.equal(got[name], tensors[name]) for name in untouched)
    assert torch.equal(got["model.layers.1.norm.weight"], torch.ones(HIDDEN).half())
    assert result.manifest.folded_norms() == {"model.layers.1.norm"}
    assert any("overflow" in text for text in notes)
    assert {e.site: e.action for e in result.plan.entries}["model.layers.0.norm"] == "share"


def test_scales_near_zero_and_lost_elements_are_recorded(tmp_path: Path) -> None:
    tensors = rms_tensors(torch.float16)
    tensors["model.layers.0.norm.weight"][:2] = torch.tensor([0.0, 1e-5])
    result, _ = rewrite(write_checkpoint_files(tmp_path / "model", tensors))
    first = result.manifest.folds[0]
    assert (first.near_zero, first.smallest_scale, first.dtype) == (2, 0.0, "F16")
    assert first.new_zeros >= 4 * HIDDEN  # one column of q and of up
    assert first.new_subnormals > HIDDEN
    assert result.manifest.folds[1].near_zero == 0


def test_an_empty_tensor_is_kept(tmp_path: Path) -> None:
    tensors = rms_tensors() | {"nothing": torch.empty(0, 3)}
    _, got = rewrite(write_checkpoint_files(tmp_path / "model", tensors))
    assert got["nothing"].shape == (0, 3)


def test_a_plan_without_folds_copies_the_weights_bit_by_bit(tmp_path: Path) -> None:
    folder = write_checkpoint_files(tmp_path / "model", rms_tensors(), shards=2)
    result, _ = rewrite(folder, plan_of([rms_norm(0)], "norms.fold=none"))
    assert result.changed_tensors == 0
    for path in folder.glob("*.safetensors"):
        assert (result.out / path.name).read_bytes() == path.read_bytes()


def test_a_file_system_that_shares_blocks_gets_only_what_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint_files(tmp_path / "model", rms_tensors(), shards=2)
    _, usual = rewrite(folder)
    written: list[int] = []

    def clone(target: int, request: int, origin: int) -> int:
        os.write(target, os.pread(origin, 1 << 20, 0))
        return 0

    def count(descriptor: int, view: memoryview, offset: int) -> None:
        written.append(len(view))
        original(descriptor, view, offset)

    original = shards.write_at
    monkeypatch.setattr(shards.fcntl, "ioctl", clone)
    monkeypatch.setattr(shards, "write_at", count)
    result, cloned = rewrite(folder, force=True)
    assert all(torch.equal(usual[name], cloned[name]) for name in usual)
    assert sum(written) == result.changed_nbytes
    assert all(record.sha256 == sha256(result.out / name) for name, record in result.manifest.files.items())


def test_progress_ends_at_its_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    rewrite(
        write_checkpoint_files(tmp_path / "model", rms_tensors(), shards=3),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert 0.99 < seen[-1][0] / seen[-1][1] <= 1.0


def test_a_patched_checkpoint_is_not_patched_again(tmp_path: Path) -> None:
    result, _ = rewrite(write_checkpoint_files(tmp_path / "model", rms_tensors()))
    with pytest.raises(NegativeVerdict, match="already patched"):
        write_checkpoint(open_source(str(result.out)), rms_plan(), tmp_path / "again")


def test_an_error_in_one_shard_stops_the_others_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_on_the_second(*arguments: object) -> object:
        if "00002" in str(arguments[3]):
            raise ValueError("no")
        return original(*arguments)  # type: ignore[arg-type]

    original: Callable[..., object] = writer.write_shard
    monkeypatch.setattr(writer, "write_shard", fail_on_the_second)
    with pytest.raises(ValueError, match="no"):
        rewrite(write_checkpoint_files(tmp_path / "model", rms_tensors(), shards=3))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
