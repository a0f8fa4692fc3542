"""memopt.json: the record of a patch, enough to verify it. It has no weights.

Reading is strict: a file of another form is an error.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

from memopt.checkpoint.fold import Fold
from memopt.checkpoint.sources.source import MANIFEST, sha256
from memopt.environment.files import MAX_JSON_BYTES, once, parse_json, read_small
from memopt.errors import ModelError
from memopt.patches.base import Entry
from memopt.plan.recipe import Recipe

SCHEMA_VERSION = 1
CONFIG_KEY = "memopt"
#: The most channels of one weight that reads a norm.
_MAX_CHANNELS = 1 << 20
_MAX_WORKERS = 4


@dataclass(frozen=True)
class FileRecord:
    sha256: str
    size: int


@dataclass(frozen=True)
class SourceRecord:
    """The checkpoint from which the weights were read."""

    model: str
    """The model as the user named it."""
    path: str
    """Folder that was read."""
    revision: str | None
    commit: str | None
    files: dict[str, FileRecord]
    """Weight files that were read."""
    others: dict[str, FileRecord]
    """config.json and every file that was copied, tokenizer and code among them."""


@dataclass(frozen=True)
class FoldRecord:
    """A fold, and its effect on the numbers."""

    fold: Fold
    dtype: str
    """Stored dtype of the norm's weight."""
    smallest_scale: float
    """min |offset + gamma|."""
    near_zero: int
    """Channels whose scale is below the dtype's epsilon: the fold cannot be undone there."""
    new_zeros: int
    new_subnormals: int
    """Elements of the consumers that became zero or subnormal."""


@dataclass(frozen=True)
class InputsRecord:
    """Shapes and dtypes of the batch that the walk ran with, if its inputs were not guessed; no data of the user."""

    file: str | None
    """Name of the user's file; None for a batch in memory or from the model's processor."""
    arguments: dict[str, Any]
    """Description of each argument, by `memopt.walk.calls.batch.describe`."""


@dataclass(frozen=True)
class Manifest:
    schema_version: int
    memopt_version: str
    source: SourceRecord
    recipe: Recipe
    entries: tuple[Entry, ...]
    folds: tuple[FoldRecord, ...]
    files: dict[str, FileRecord]
    """Every other file of the folder."""
    notes: tuple[str, ...] = ()
    inputs: InputsRecord | None = None
    changed_outputs: tuple[str, ...] = ()
    """Fields of the model's output that the recipe allows folds to change, such as hidden states."""
    emitted: tuple[str, ...] = ()
    """Names of the `files` that configure training engines and are no part of the model."""

    def folded_norms(self) -> frozenset[str]:
        """Module names of the norms whose affine was folded into the next linears."""
        return frozenset(record.fold.norm for record in self.folds)

    def batch(self) -> dict[str, Any] | None:
        """The batch of `inputs` on the meta device; a walk needs its shapes only."""
        from memopt.walk.calls.batch import from_description

        try:
            return None if self.inputs is None else from_description(self.inputs.arguments)
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ModelError(f"The inputs in {MANIFEST} have a form that memopt does not write: {error}.") from None

    def to_json(self) -> str:
        data = dataclasses.asdict(self) | {"recipe": self.recipe.model_dump(mode="json")}
        for record, written in zip(data["folds"], self.folds, strict=True):
            record["fold"] = fold_to_dict(written.fold)
        if not self.emitted:
            del data["emitted"]
        return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def changed_files(
    files: Mapping[str, FileRecord], folder: Path, known: Mapping[Path, str] = MappingProxyType({})
) -> list[tuple[str, str]]:
    """(name, what happened to it) of each of the recorded `files` that is missing or changed in `folder`.
    `known`: path of a file that was read already -> its SHA-256."""

    def change(name: str) -> str:
        path, record = folder / name, files[name]
        if not os.path.isfile(path):  # a name may be too long for a path
            return "is missing"
        same = path.stat().st_size == record.size and (known.get(path) or sha256(path)) == record.sha256
        return "" if same else "was changed"

    with ThreadPoolExecutor(min(_MAX_WORKERS, os.cpu_count() or 1)) as pool:
        return [(name, what) for name, what in zip(files, pool.map(change, files), strict=True) if what]


def fold_to_dict(fold: Fold) -> dict[str, Any]:
    """JSON-ready form of a fold, its channels as runs."""
    data = dataclasses.asdict(fold)
    for consumer in data["consumers"]:
        consumer["channels"] = _to_runs(consumer["channels"])
    return data


def read_manifest(folder: Path) -> Manifest:
    """The manifest of `folder`; a ModelError if it is missing or damaged, or a newer memopt wrote it."""
    from pydantic import TypeAdapter, ValidationError

    path = Path(folder) / MANIFEST
    try:
        data = parse_json(read_small(path, MAX_JSON_BYTES), once)
        written = copy.deepcopy(data)
    except FileNotFoundError:
        raise ModelError(f"'{folder}' has no {MANIFEST}.", "Give a folder that `memopt patch` wrote.") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"'{path}' is not readable JSON: {error}.", "Run `memopt patch` again.") from None
    version = data.get("schema_version") if isinstance(data, dict) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        writer = data.get("memopt_version", "a newer version")
        raise ModelError(f"'{path}' was written by memopt {writer}, which is newer than this one.", "Upgrade memopt.")
    try:
        if version != SCHEMA_VERSION:
            raise ValueError(f"schema_version is {version!r}")
        if outside := [
            n for n in (*data["files"], *data["source"]["files"], *data["source"]["others"]) if not _is_inside(n)
        ]:
            raise ValueError(f"{outside[0][:80]!r} is no file inside a folder")
        for record in data["folds"]:
            for consumer in record["fold"]["consumers"]:
                consumer["channels"] = _from_runs(consumer["channels"])
        # Validate JSON, not Python objects: in strict mode a JSON array may become a tuple, a Python list may not.
        manifest = TypeAdapter(Manifest).validate_json(json.dumps(data), strict=True)
        for where, what in differences(json.loads(manifest.to_json()) | {"recipe": 0}, written | {"recipe": 0}):
            raise ValueError(f"{'.'.join(where)}: {what}")
        return manifest
    except ValidationError as error:
        first = error.errors()[0]
        why = f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}"
    raise ModelError(f"'{path}' is not a valid manifest ({why}).", "Run `memopt patch` again.")


def differences(
    before: Mapping[str, Any], after: Mapping[str, Any], at: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], str]]:
    """(key and the keys inside it, difference) of each value that differs; 1, 1.0 and true are three values."""
    for name in sorted({*before, *after}):
        where = (*at, name)
        if name not in after:
            yield where, "missing"
        elif name not in before:
            yield where, "added"
        elif isinstance(before[name], dict) and isinstance(after[name], dict):
            yield from differences(before[name], after[name], where)
        elif (one := _text(before[name])) != (other := _text(after[name])):
            yield where, f"{_short(other)} instead of {_short(one)}"


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_inside(name: str) -> bool:
    """Whether `name` is a path to a file below the folder of the manifest."""
    path = PurePosixPath(name)
    return name.isprintable() and str(path) == name != "." and not path.is_absolute() and ".." not in path.parts


def add_config_key(config: bytes, value: dict[str, Any]) -> bytes:
    """config.json with one more key; every other byte is unchanged."""
    text = config.decode("utf-8")
    end = text.rindex("}")
    body = text[:end].rstrip()
    lines = json.dumps(value, indent=2, ensure_ascii=False).replace("\n", "\n  ")
    comma = "" if body.endswith("{") else ","
    return f'{body}{comma}\n  "{CONFIG_KEY}": {lines}\n{text[end:]}'.encode()


def _to_runs(channels: tuple[int, ...] | None) -> list[list[int]] | None:
    """Channels as [first, count] runs of consecutive numbers; a run of -1 is [-1, count]."""
    if channels is None:
        return None
    runs: list[list[int]] = []
    for channel in channels:
        if runs and channel == (-1 if runs[-1][0] < 0 else sum(runs[-1])):
            runs[-1][1] += 1
        else:
            runs.append([channel, 1])
    return runs


def _from_runs(runs: list[list[int]] | None) -> list[int] | None:
    if runs is None:
        return None
    if sum(count for _, count in runs) > _MAX_CHANNELS or any(count < 0 for _, count in runs):
        raise ValueError("it lists more channels than a weight has")
    return [-1 if first < 0 else first + step for first, count in runs for step in range(count)]
