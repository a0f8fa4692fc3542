"""A checkpoint to read from: which files, which tensors, where their bytes are.

Only headers are read when a source is opened; tensors are read on demand, in ranges. Writing and
arithmetic live elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memopt.checkpoint.sources.header import Header, TensorInfo, read_header
from memopt.checkpoint.sources.hub import OTHER_WEIGHTS, commit_of, locate
from memopt.errors import ModelError

if TYPE_CHECKING:
    import torch

    from memopt.checkpoint.sources.pickles import PickledTensors

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MANIFEST = "memopt.json"
_IGNORED_FOLDERS = frozenset({".git", ".cache", "__pycache__"})


@dataclass(frozen=True)
class Shard:
    """One safetensors file, as it is or (from a pickle) as it would be written."""

    name: str
    header: Header
    origin: Path
    """File of the source that holds the tensors."""


@dataclass(frozen=True)
class CheckpointSource:
    """An opened checkpoint; see :func:`open_source`."""

    model: str
    """As the user named it."""
    root: Path
    revision: str | None
    commit: str | None
    """Commit of a hub snapshot; None for a folder of the user's."""
    shards: tuple[Shard, ...]
    index: bytes | None
    """Content of the shard index; None for a single file."""
    side_files: tuple[str, ...]
    """Every other file that belongs to the model, relative to `root`."""
    left_out: tuple[str, ...]
    """Weights of other formats, which a rewritten checkpoint does not contain."""
    config: Mapping[str, Any]
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names that share a storage in a pickle -> the others of the group."""
    pickled: PickledTensors | None = None

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
        stop = info.nbytes if stop is None else stop
        if self.pickled is not None:
            return self.pickled.read_range(name, start, stop)
        buffer = bytearray(stop - start)
        path = self._origins[info.shard]
        with open(path, "rb", buffering=0) as file:
            read_into(file.fileno(), buffer, info.offset + start, path)
        return buffer

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor `name`, in memory of its own."""
        import torch

        info = self.tensors[name]
        dtype = torch_dtype(info.dtype)
        if prod(info.shape) == 0:
            return torch.empty(info.shape, dtype=dtype)
        return torch.frombuffer(self.read_range(name), dtype=dtype).reshape(info.shape)

    @cached_property
    def _origins(self) -> Mapping[str, Path]:
        return {shard.name: shard.origin for shard in self.shards}


def open_source(
    model: str, *, revision: str | None = None, allow_pickle: bool = False, weights: bool = True
) -> CheckpointSource:
    """Open the checkpoint of a local folder or hub id.

    Args:
        model: a local folder or a hub id.
        revision: branch, tag or commit; hub ids only.
        allow_pickle: read ``pytorch_model*.bin`` (with ``weights_only=True``) when there is no safetensors file.
        weights: False downloads no weights; if they are not in the cache, the source has no shards.

    Raises:
        ModelError: nothing is found, a file is missing or damaged, or there is no safetensors file.
    """
    root = locate(model, revision=revision, allow_pickle=allow_pickle, weights=weights)
    config = read_config(root)
    aliases: Mapping[str, tuple[str, ...]] = {}
    pickled = None
    shards: tuple[Shard, ...]
    index: bytes | None
    if not weights and commit_of(root) and not _has_weights(root):
        shards, index = (), None
    elif (root / SINGLE).is_file():
        shards, index = (Shard(SINGLE, read_header(root / SINGLE), root / SINGLE),), None
    elif (root / INDEX).is_file():
        shards, index = _open_shards(root)
    elif allow_pickle and (files := _pickles(root)):
        from memopt.checkpoint.sources.pickles import load_pickles

        pickled = load_pickles(files)
        shards, index, aliases = pickled.shards, pickled.index, pickled.aliases
    else:
        raise _no_weights(root, allow_pickle)
    known = {shard.name for shard in shards} | {INDEX, MANIFEST, "config.json"}
    side_files, left_out = _other_files(root, known)
    return CheckpointSource(
        model=model,
        root=root,
        revision=revision,
        commit=commit_of(root),
        shards=shards,
        index=index,
        side_files=side_files,
        left_out=left_out,
        config=config,
        aliases=aliases,
        pickled=pickled,
    )


def read_config(root: Path) -> dict[str, Any]:
    """config.json of the folder `root`."""
    path = root / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"'{root}' has no config.json.", "Give the folder of a Hugging Face model.") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"'{path}' is not readable JSON: {error}.") from None
    if not isinstance(config, dict):
        raise ModelError(f"'{path}' is not a JSON object.")
    return config


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype for a safetensors dtype.

    Raises:
        ModelError: torch has none (the sub-byte formats).
    """
    import torch

    names = {
        "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
        "U64": "uint64", "I64": "int64", "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
        "C64": "complex64", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu",
        "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    }  # fmt: skip
    found = getattr(torch, names.get(name, ""), None)
    if not isinstance(found, torch.dtype):
        raise ModelError(f"torch has no dtype for the safetensors dtype {name}.")
    return found


def sha256(path: Path, advance: Callable[[int], None] | None = None) -> str:
    """SHA-256 of a file, read in blocks; `advance` is called with the size of each."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(1 << 22):
            digest.update(block)
            if advance is not None:
                advance(len(block))
    return digest.hexdigest()


def read_into(descriptor: int, buffer: bytearray, offset: int, path: Path) -> None:
    """Fill `buffer` from position `offset` of an open file."""
    view = memoryview(buffer)
    while view:
        count = os.preadv(descriptor, [view], offset)
        if count == 0:
            raise ModelError(f"'{path}' became shorter while it was read.")
        view, offset = view[count:], offset + count


def parse_index(path: Path, content: bytes) -> dict[str, str]:
    """Tensor name -> file name of a shard index."""
    try:
        weight_map = json.loads(content)["weight_map"]
        valid = all(isinstance(value, str) and value == Path(value).name for value in weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError):
        valid = False
    if not valid or not weight_map:
        raise ModelError(f"'{path}' is not a valid shard index.", "Download or copy it again.")
    return dict(weight_map)


def check_index(path: Path, weight_map: Mapping[str, str], headers: Mapping[str, Header]) -> None:
    """Check that an index names exactly the tensors of the shards.

    Raises:
        ModelError: it names a tensor that its shard lacks, or lacks one.
    """
    for name, shard in weight_map.items():
        if name not in headers[shard].tensors:
            raise ModelError(f"'{path}' places tensor '{name}' in '{shard}', which does not contain it.")
    for shard, header in headers.items():
        for name in header.tensors:
            if weight_map.get(name) != shard:
                raise ModelError(f"'{shard}' contains tensor '{name}', which '{path}' does not place there.")


def _open_shards(root: Path) -> tuple[tuple[Shard, ...], bytes]:
    path = root / INDEX
    content = path.read_bytes()
    weight_map = parse_index(path, content)
    names = sorted(set(weight_map.values()))
    for name in names:
        if not (root / name).is_file():
            raise ModelError(f"'{path}' names the shard '{name}', which is missing.", "Download or copy it again.")
    headers = {name: read_header(root / name) for name in names}
    check_index(path, weight_map, headers)
    return tuple(Shard(name, headers[name], root / name) for name in names), content


def _pickles(root: Path) -> list[Path]:
    single, index = root / "pytorch_model.bin", root / "pytorch_model.bin.index.json"
    if single.is_file() or not index.is_file():
        return [single] if single.is_file() else []
    names = sorted(set(parse_index(index, index.read_bytes()).values()))
    for name in names:
        if not (root / name).is_file():
            raise ModelError(f"'{index}' names the shard '{name}', which is missing.", "Download or copy it again.")
    return [root / name for name in names]


def _no_weights(root: Path, allow_pickle: bool) -> ModelError:
    if not allow_pickle and _pickles(root):
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


def _has_weights(root: Path) -> bool:
    return any(path.name.endswith((".safetensors", ".bin")) for path in root.iterdir())


def _other_files(root: Path, known: set[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(files to copy, weight files left out) among all files below `root`."""
    side_files: list[str] = []
    left_out: list[str] = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - _IGNORED_FOLDERS)
        for name in sorted(files):
            path = Path(folder, name).relative_to(root).as_posix()
            if path in known:
                continue
            if not (root / path).is_file():
                raise ModelError(f"'{root / path}' is a broken link or no plain file.", "Remove it or copy it again.")
            is_weight = name.endswith(".safetensors") or any(fnmatchcase(name, pattern) for pattern in OTHER_WEIGHTS)
            is_weight = is_weight or name.endswith(".safetensors.index.json")
            (left_out if is_weight else side_files).append(path)
    return tuple(side_files), tuple(left_out)
