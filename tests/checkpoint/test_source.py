"""Opening checkpoints, and refusing what is broken with the file's name."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from memopt.checkpoint.manifest import read_manifest
from memopt.checkpoint.patched import is_patched
from memopt.checkpoint.sources import header, source
from memopt.checkpoint.sources.header import DTYPE_BITS, torch_dtype
from memopt.checkpoint.sources.source import open_source
from memopt.environment import files
from memopt.errors import ModelError
from memopt.walk.models.config import load_config
from tests.checkpoint.builders import rms_tensors, write_checkpoint_files
from tests.checkpoint.test_hub import BELONGS, COPIES


def write_raw(path: Path, header: object, data: bytes = b"", *, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def entry(begin: int, end: int, *, dtype: str = "F32", shape: tuple[int, ...] | None = None) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape or [(end - begin) // 4]), "data_offsets": [begin, end]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint_files(tmp_path / "model", rms_tensors())


def refuses(folder: Path, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        open_source(str(folder))


@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_reads_back_as_it_was_written(tmp_path: Path, shards: int) -> None:
    tensors = rms_tensors()
    source = open_source(str(write_checkpoint_files(tmp_path / "model", tensors, shards=shards)))
    assert len(source.shards) == shards
    assert source.tensors.keys() == tensors.keys()
    assert all(torch.equal(source.read(name), tensor) for name, tensor in tensors.items())


def test_a_range_of_a_tensor_is_its_bytes(folder: Path) -> None:
    source = open_source(str(folder))
    name = "model.layers.0.q.weight"
    whole = source.read(name).view(torch.uint8).numpy().tobytes()
    assert source.read_range(name, 6, 100) == whole[6:100]


def test_side_files_are_listed_and_other_weights_left_out(folder: Path) -> None:
    (folder / "onnx").mkdir()
    for name in ("onnx/model.onnx", "pytorch_model.bin", "model.gguf", "consolidated.safetensors", "modeling_x.py"):
        (folder / name).write_text("x")
    source = open_source(str(folder))
    assert source.side_files == ("LICENSE", "modeling_x.py", "tokenizer.json")
    assert set(source.left_out) == {"onnx/model.onnx", "pytorch_model.bin", "model.gguf", "consolidated.safetensors"}


def test_weights_that_are_no_other_form_of_the_model_are_copied(folder: Path) -> None:
    stale = ["model.fp16.safetensors", "model-00001-of-00009.safetensors"]
    for name in BELONGS[1:] + COPIES + stale:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("x")
    source = open_source(str(folder))
    assert set(source.side_files) == {*BELONGS[1:], "LICENSE", "tokenizer.json"}
    assert set(source.left_out) == {*COPIES, *stale}


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int8, torch.uint8, torch.int64, torch.float8_e4m3fn, torch.float64]
)
def test_dtypes_that_are_not_folded_can_still_be_read(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    source = open_source(str(write_checkpoint_files(tmp_path / "model", {"x": tensor, "empty": tensor[:0].clone()})))
    assert torch.equal(source.read("x").view(torch.uint8), tensor.view(torch.uint8))
    assert source.read("empty").shape == (0, 3)


def test_every_whole_byte_dtype_of_the_format_is_known_to_torch_with_its_size() -> None:
    for name, bits in DTYPE_BITS.items():
        if bits >= 8:
            assert 8 * torch_dtype(name).itemsize == bits, name


BROKEN = {
    "empty file": b"",
    "truncated length": b"\x10\x00",
    "header longer than the file": struct.pack("<Q", 1000) + b"{}",
    "huge header": struct.pack("<Q", 2**63) + b"{}",
    "not JSON": struct.pack("<Q", 4) + b"abcd",
    "not an object": struct.pack("<Q", 2) + b"[]",
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_a_damaged_file_is_named(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    refuses(folder, r"model\.safetensors' is not a valid safetensors file")


LAYOUTS = {
    "overlap": ({"a": entry(0, 8), "b": entry(4, 12)}, 12),
    "gap": ({"a": entry(0, 4), "b": entry(8, 12)}, 12),
    "past the end": ({"a": entry(0, 16)}, 12),
    "file longer than its tensors": ({"a": entry(0, 8)}, 12),
    "size against shape": ({"a": entry(0, 8, shape=(3,))}, 8),
    "negative offset": ({"a": entry(-4, 4)}, 4),
    "unknown dtype": ({"a": entry(0, 8, dtype="Q7")}, 8),
    "missing field": ({"a": {"dtype": "F32"}}, 0),
    "not an entry": ({"a": 3}, 0),
    "fractional shape": ({"a": {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 6]}}, 6),
}


@pytest.mark.parametrize(("header", "size"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_offsets_that_do_not_fit_are_refused(folder: Path, header: dict[str, object], size: int) -> None:
    write_raw(folder / "model.safetensors", header, bytes(size))
    refuses(folder, r"model\.safetensors")


def test_a_name_that_occurs_twice_is_refused(folder: Path) -> None:
    one = json.dumps(entry(0, 4))
    write_raw(folder / "model.safetensors", f'{{"a": {one}, "a": {one}}}'.encode(), bytes(4))
    refuses(folder, "twice")


def test_a_truncated_shard_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-2])
    refuses(folder, "past the end")


def test_an_index_that_names_a_missing_shard_is_refused_with_its_name(tmp_path: Path) -> None:
    folder = write_checkpoint_files(tmp_path / "model", rms_tensors(), shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    refuses(folder, "model-00002-of-00002")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        '{"metadata": {}, "weight_map": {}}',
        '{"metadata": {}, "weight_map": {"a": 3}}',
        '{"metadata": {}, "weight_map": {"a": "../b"}}',
        '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}',  # transformers reads the metadata of every index
    ],
)
def test_a_broken_index_is_refused(tmp_path: Path, content: str) -> None:
    folder = write_checkpoint_files(tmp_path / "model", rms_tensors(), shards=2)
    (folder / "model.safetensors.index.json").write_text(content)
    refuses(folder, "not a valid shard index")


@pytest.mark.parametrize("place", [{"model.embed.weight": "model-00002-of-00002.safetensors"}, {}])
def test_a_tensor_that_the_index_places_in_another_shard_or_does_not_name_is_refused(
    tmp_path: Path, place: dict[str, str]
) -> None:
    folder = write_checkpoint_files(tmp_path / "model", rms_tensors(), shards=2)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["model.embed.weight"]
    index["weight_map"] |= place
    path.write_text(json.dumps(index))
    refuses(folder, r"model\.embed\.weight")


def test_a_pickle_is_refused_with_the_option_that_reads_it(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"x": torch.ones(2)}, folder / "pytorch_model.bin")
    refuses(folder, "--allow-pickle")


@pytest.mark.parametrize(
    ("extra", "words"),
    [("model.gguf", "GGUF"), ("adapter_model.bin", "adapter"), ("README.md", "no 'model.safetensors'")],
)
def test_a_folder_without_weights_says_what_it_holds(folder: Path, extra: str, words: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / extra).write_text("x")
    refuses(folder, words)


def test_a_path_that_does_not_exist_is_not_taken_for_a_hub_id() -> None:
    with pytest.raises(ModelError, match="does not exist"):
        open_source("./no/such/folder")


def test_a_file_is_not_a_folder(folder: Path) -> None:
    with pytest.raises(ModelError, match="is a file"):
        open_source(str(folder / "config.json"))


@pytest.mark.parametrize("name", ["no-such-model-anywhere", "no-such/model-anywhere"])
def test_an_unknown_hub_id_offline_names_the_variable(name: str) -> None:
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE"):
        open_source(name)


@pytest.mark.parametrize("name", ["what ever", "a--b", "x" * 200])
def test_an_impossible_hub_id_says_so(name: str) -> None:
    with pytest.raises(ModelError, match="nor a hub id"):
        open_source(name)


def test_a_revision_of_a_folder_makes_no_sense(folder: Path) -> None:
    with pytest.raises(ModelError, match="--revision"):
        open_source(str(folder), revision="main")


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_missing_or_broken_config_is_named(folder: Path, content: str | None) -> None:
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_text(content)
    refuses(folder, r"config\.json")


def test_a_config_that_names_another_weight_file_is_refused(tmp_path: Path) -> None:
    named = {"transformers_weights": "hf.safetensors"}
    folder = write_checkpoint_files(tmp_path / "model", rms_tensors(), config=named)
    refuses(folder, r"names the weight file 'hf\.safetensors'")
    own = {"transformers_weights": "model.safetensors"}
    assert open_source(str(write_checkpoint_files(tmp_path / "own", rms_tensors(), config=own))).tensors


def test_a_hub_id_in_the_cache_opens_with_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "hub" / "models--someone--tiny"
    write_checkpoint_files(repo / "snapshots" / commit, rms_tensors())
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    source = open_source("someone/tiny")
    assert (source.model, source.commit) == ("someone/tiny", commit)
    assert source.tensors


def test_a_single_file_wins_over_an_index_as_in_transformers(tmp_path: Path) -> None:
    folder = write_checkpoint_files(tmp_path / "model", rms_tensors(), shards=2)
    save_file({"x": torch.ones(1)}, folder / "model.safetensors")
    assert list(open_source(str(folder)).tensors) == ["x"]


def test_a_broken_link_is_named(folder: Path) -> None:
    (folder / "vocab.txt").symlink_to("nowhere")
    refuses(folder, r"vocab\.txt")


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def bound_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the path of a socket may be short only
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


NO_FILES = {"pipe": pipe, "endless device": endless, "socket": bound_socket}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("make", NO_FILES.values(), ids=NO_FILES.keys())
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "generation_config.json", "memopt.json"])
def test_what_is_no_plain_file_is_refused_and_never_waited_for(
    folder: Path, name: str, make: Callable[[Path], None]
) -> None:
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    readers: list[Callable[[str], object]] = [open_source, load_config]
    for read in readers:
        with pytest.raises(ModelError, match=rf"{name}' is (a named pipe|a device|a socket), not a plain file"):
            read(str(folder))
    with pytest.raises(ModelError):
        read_manifest(folder)
    with contextlib.suppress(ModelError):
        is_patched(folder)  # returns


@pytest.mark.parametrize(
    ("name", "size"),
    [("config.json", 9 << 20), ("generation_config.json", 9 << 20), ("x.index.json", 17 << 20), ("t.json", 129 << 20)],
)
def test_a_json_file_that_is_too_large_is_refused_unread(folder: Path, name: str, size: int) -> None:
    with (folder / name).open("wb") as file:
        file.truncate(size)
    refuses(folder, rf"{name}' has {size:,} bytes")


def test_more_side_files_than_a_model_has_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_MAX_FILES", 3)
    open_source(str(folder))
    (folder / "logs").mkdir()
    for number in range(3):
        (folder / "logs" / f"{number}.txt").touch()
    refuses(folder, "more than 3 files beside the weights")


@pytest.mark.parametrize("shards", [1, 3])
def test_more_tensors_than_a_model_has_are_refused(
    tmp_path: Path, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint_files(tmp_path / "model", rms_tensors(), shards=shards)
    monkeypatch.setattr(header, "MAX_TENSORS", 8)
    refuses(folder, r"memopt reads at most 8 tensors")


@pytest.mark.parametrize("shards", [1, 3])
def test_headers_that_are_too_large_are_refused(tmp_path: Path, shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint_files(tmp_path / "model", rms_tensors(), shards=shards)
    monkeypatch.setattr(header, "MAX_JSON_BYTES", 800)
    refuses(folder, "800 bytes of headers")


@pytest.mark.parametrize("name", ["a\nb", "\x1b[2J", "\ud800", ""])
def test_a_name_that_cannot_be_printed_is_refused(folder: Path, name: str) -> None:
    write_raw(folder / "model.safetensors", {name: entry(0, 4)}, bytes(4))
    with pytest.raises(ModelError, match="not a valid safetensors file") as caught:
        open_source(str(folder))
    assert str(caught.value).isprintable()


def test_a_file_with_a_name_that_cannot_be_printed_is_refused(folder: Path) -> None:
    (folder / "a\x1b[2Jb").touch()
    refuses(folder, "unprintable")


DEEP, LONG = "[" * 100_000, '{"a": 1' + "0" * 5000 + "}"
NESTED = '{"a": [' * 235 + "1" + "]}" * 235  # Python reads it, and cannot copy it


@pytest.mark.parametrize("content", [DEEP, NESTED, '{"a":' * 100_000, '{"a": "\\ud800"}', LONG])
def test_json_that_python_cannot_hold_is_refused(folder: Path, content: str) -> None:
    for name in ("config.json", "memopt.json"):
        (folder / name).write_text(content)
    for read in (open_source, load_config, read_manifest):
        with pytest.raises(ModelError, match="JSON"):
            read(str(folder))  # type: ignore[operator]


def test_a_file_that_grows_while_it_is_read_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_check", lambda *arguments: None)
    with pytest.raises(ModelError, match="grew"):
        files.read_small(folder / "config.json", 10)
