"""A checkpoint to read from: its files, its tensors, and the places of their bytes.

Opening a source reads headers only; tensors are read on demand, in ranges. The formats of weight files are in `base`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memopt.checkpoint.sources.base import INDEX, SINGLE, Format, Shard, Weights
from memopt.checkpoint.sources.header import TensorInfo, torch_dtype
from memopt.checkpoint.sources.hub import OTHER_WEIGHTS, locate
from memopt.checkpoint.sources.pickles import PickleFormat
from memopt.checkpoint.sources.safetensors import SafetensorsFiles, SafetensorsFormat
from memopt.environment.files import (
    MAX_CONFIG_BYTES,
    MAX_CONFIG_NESTS,
    check_folder,
    check_side_file,
    read_object,
    refuse_adapter,
    user_path,
)
from memopt.errors import ModelError

if TYPE_CHECKING:
    import torch

MANIFEST = "memopt.json"
#: Every format that is read; if a folder has several, the first in this list is used.
FORMATS: tuple[Format, ...] = (SafetensorsFormat(), PickleFormat())
#: Most files beside the weights that are copied.
_MAX_FILES = 5_000
#: The model's own weights under names that transformers knows, but that were not opened: variants, stale shards.
_VARIANTS = ("model.*safetensors", "model.*safetensors.index.json", "model-*-of-*.safetensors")
_IGNORED_FOLDERS = frozenset({".git", ".cache", "__pycache__"})


@dataclass(frozen=True)
class CheckpointSource:
    """An opened checkpoint; see :func:`open_source`."""

    model: str
    """The model as the user named it."""
    root: Path
    revision: str | None
    commit: str | None
    """Commit, if `model` was opened as a hub id; None if it is a folder."""
    weights: Weights
    side_files: tuple[str, ...]
    """Every other file that belongs to the model, relative to `root`."""
    left_out: tuple[str, ...]
    """Weights in other forms, PEFT adapters and a trainer's state, which a rewritten checkpoint does not contain."""
    config: Mapping[str, Any]
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Parameter of the model -> its other name here; only `checkpoint.names.with_renamed` finds them out."""

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The weight files (for pickles: the safetensors files to write); empty if they were not downloaded."""
        return self.weights.shards

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name."""
        return {name: info for shard in self.shards for name, info in shard.header.tensors.items()}

    @property
    def space_needed(self) -> int:
        """Bytes that a rewritten copy takes on the disk."""
        return self.nbytes + sum((self.root / name).stat().st_size for name in self.side_files)

    @property
    def nbytes(self) -> int:
        """Size of all shards."""
        return sum(shard.header.file_size for shard in self.shards)

    def read_range(self, name: str, start: int = 0, stop: int | None = None) -> bytearray:
        """Bytes [start, stop) of the tensor `name`, in the safetensors layout."""
        info = self.tensors[name]
        content = bytearray((info.nbytes if stop is None else stop) - start)
        self.weights.read_into(memoryview(content), info, start)
        return content

    def read(self, name: str) -> torch.Tensor:
        """A copy of the whole tensor `name`."""
        import torch

        info = self.tensors[name]
        dtype = torch_dtype(info.dtype)
        if prod(info.shape) == 0:
            return torch.empty(info.shape, dtype=dtype)
        return torch.frombuffer(self.read_range(name), dtype=dtype).reshape(info.shape)


def open_source(
    model: str, *, revision: str | None = None, allow_pickle: bool = False, weights: bool = True
) -> CheckpointSource:
    """Open the checkpoint of a local folder or hub id.

    Args:
        model: a local folder or a hub id.
        revision: branch, tag or commit; hub ids only.
        allow_pickle: read ``pytorch_model*.bin`` (with ``weights_only=True``) when there is no safetensors file.
        weights: False downloads no weights; where there are none, the source has no shards.

    Raises:
        ModelError: nothing is found, a file is missing or damaged, or there is no safetensors file.
    """
    root = locate(model, revision=revision, allow_pickle=allow_pickle, weights=weights)
    check_folder(root)
    refuse_adapter(root)
    config = read_config(root)
    _check_named(root, config)
    suffixes = tuple(each.suffix for each in FORMATS)
    if not weights and not any(path.name.endswith(suffixes) for path in root.iterdir()):
        opened: Weights = SafetensorsFiles((), None)  # they were not downloaded
    else:
        opened = _format_of(root, allow_pickle).open(root)
    known = {shard.name for shard in opened.shards} | {INDEX, MANIFEST, "config.json"}
    side_files, left_out = other_files(root, known)
    return CheckpointSource(
        model=model,
        root=root,
        revision=revision,
        commit=None if user_path(model).is_dir() else root.name,  # the cache names a folder by its commit
        weights=opened,
        side_files=side_files,
        left_out=left_out,
        config=config,
    )


def needs_allow_pickle(files: Iterable[str]) -> bool:
    """Whether weight files of these names are read only with `allow_pickle`."""
    suffixes = tuple(f"{each.suffix}{end}" for each in FORMATS if each.runs_code for end in ("", ".index.json"))
    return any(name.endswith(suffixes) for name in files)


def read_config(root: Path) -> dict[str, Any]:
    """config.json of the folder `root`."""
    try:
        return read_object(root / "config.json", None, MAX_CONFIG_BYTES, MAX_CONFIG_NESTS)
    except FileNotFoundError:
        raise ModelError(f"'{root}' has no config.json.", "Give the folder of a Hugging Face model.") from None


def sha256(path: Path, advance: Callable[[int], None] | None = None) -> str:
    """SHA-256 of a file, read in blocks; `advance` is called with the size of each."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(1 << 22):
            digest.update(block)
            if advance is not None:
                advance(len(block))
    return digest.hexdigest()


def _check_named(root: Path, config: Mapping[str, Any]) -> None:
    """Refuse a config that names a weight file which transformers loads in place of the one that is read here."""
    named = config.get("transformers_weights")
    if named not in (None, SINGLE, INDEX) or (named == INDEX and (root / SINGLE).is_file()):
        raise ModelError(
            f"The config.json of '{root}' names the weight file {ascii(named)[:80]} "
            "('transformers_weights'), which memopt does not read.",
            "Load the model with transformers, save it with save_pretrained, and give that folder.",
        )


def _format_of(root: Path, allow_pickle: bool) -> Format:
    for each in FORMATS:
        if (allow_pickle or not each.runs_code) and each.is_in(root):
            return each
    raise _no_weights(root)


def _no_weights(root: Path) -> ModelError:
    """The error for a folder without weights in a format that may be read."""
    if any(each.is_in(root) for each in FORMATS if each.runs_code):
        return ModelError(
            f"'{root}' has its weights in pickle files only, which can run code when they are opened.",
            "Add --allow-pickle to read them with torch's safe loader and write safetensors.",
        )
    if any(root.glob("*.gguf")):
        return ModelError(
            f"'{root}' has GGUF weights only, which cannot be fine-tuned.", "Give the model they were converted from."
        )
    if any(root.glob("adapter_model.*")):
        return ModelError(f"'{root}' holds an adapter only.", "Give the base model that it belongs to.")
    return ModelError(f"'{root}' has no '{SINGLE}' and no '{INDEX}'.", "Give the folder of a Hugging Face model.")


def other_files(root: Path, known: set[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(files to copy, weight files left out) among all files below `root`."""
    side_files: list[str] = []
    left_out: list[str] = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - _IGNORED_FOLDERS)
        for name in sorted(files):
            path = Path(folder, name).relative_to(root).as_posix()
            if path in known:
                continue
            check_side_file(root / path)
            if len(side_files) + len(left_out) >= _MAX_FILES:
                raise ModelError(
                    f"'{root}' holds more than {_MAX_FILES:,} files beside the weights, which would all be copied.",
                    "Give a folder with only the model.",
                )
            other_form = any(fnmatchcase(path, pattern) for pattern in (*OTHER_WEIGHTS, *_VARIANTS))
            (left_out if other_form else side_files).append(path)
    return tuple(side_files), tuple(left_out)
