"""memopt.json: what goes in comes out, and anything else is an error."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from memopt.checkpoint.fold import Fold, FoldedConsumer
from memopt.checkpoint.manifest import (
    FileRecord,
    FoldRecord,
    Manifest,
    SourceRecord,
    add_config_key,
    read_manifest,
)
from memopt.checkpoint.patched import is_patched
from memopt.errors import ModelError
from memopt.patches.base import Entry
from memopt.plan.recipe import load_recipe


def manifest() -> Manifest:
    consumers = (
        FoldedConsumer("a.weight", 1, channels=(4, 5, 6, -1, -1, 0, 0, 1), bias="a.bias", scale=0.5),
        FoldedConsumer("b.weight", 0),
    )
    fold = Fold("norm", "norm.weight", 1, "norm.bias", consumers)
    return Manifest(
        schema_version=1,
        memopt_version="0.1.0",
        source=SourceRecord("some/model", "/models/x", "main", "abc", {"model.safetensors": FileRecord("0f", 10)}, {}),
        recipe=load_recipe("exact"),
        entries=(Entry("norm", "norm", "fold", "into a.weight"),),
        folds=(FoldRecord(fold, "BF16", 0.25, 1, 2, 3),),
        files={"config.json": FileRecord("1e", 3)},
        notes=("a note",),
    )


def write(folder: Path, data: Any) -> Path:
    (folder / "memopt.json").write_text(data if isinstance(data, str) else json.dumps(data))
    return folder


def test_a_manifest_reads_back_equal(tmp_path: Path) -> None:
    assert read_manifest(write(tmp_path, manifest().to_json())) == manifest()


def test_long_channel_lists_are_stored_as_runs() -> None:
    consumer = FoldedConsumer("w", 1, channels=tuple(range(4096)) + (-1,) * 4096)
    record = dataclasses.replace(manifest().folds[0], fold=Fold("n", "n.weight", 0, None, (consumer,)))
    data = json.loads(dataclasses.replace(manifest(), folds=(record,)).to_json())
    assert data["folds"][0]["fold"]["consumers"][0]["channels"] == [[0, 4096], [-1, 4096]]


def test_the_error_for_a_manifest_of_a_newer_version_names_the_upgrade(tmp_path: Path) -> None:
    data = json.loads(manifest().to_json()) | {"schema_version": 2, "memopt_version": "9.9"}
    with pytest.raises(ModelError, match=r"9\.9.*newer.*Upgrade"):
        read_manifest(write(tmp_path, data))


@pytest.mark.parametrize("key", ["source", "folds", "files", "recipe", "schema_version"])
def test_a_missing_key_is_an_error(tmp_path: Path, key: str) -> None:
    data = json.loads(manifest().to_json())
    del data[key]
    with pytest.raises(ModelError, match="not a valid manifest"):
        read_manifest(write(tmp_path, data))


@pytest.mark.parametrize(
    ("path", "value"),
    [("files", []), ("folds", {}), ("folds", [1]), ("source", None), ("entries", "x"), ("schema_version", "1")],
)
def test_a_value_of_another_type_is_an_error(tmp_path: Path, path: str, value: object) -> None:
    data = json.loads(manifest().to_json()) | {path: value}
    with pytest.raises(ModelError, match="not a valid manifest"):
        read_manifest(write(tmp_path, data))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3"])
def test_what_is_no_json_object_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(ModelError, match=r"memopt\.json"):
        read_manifest(write(tmp_path, text))


def test_a_folder_without_a_manifest_says_where_one_comes_from(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="memopt patch"):
        read_manifest(tmp_path)


def test_either_trace_shows_that_a_folder_is_patched(tmp_path: Path) -> None:
    assert not is_patched(tmp_path)
    (tmp_path / "config.json").write_bytes(add_config_key(b'{"a": 1}', {"version": "0"}))
    assert is_patched(tmp_path)
    (tmp_path / "config.json").unlink()
    write(tmp_path, "{}")
    assert is_patched(tmp_path)
