"""The protocol for formats of weight files: whether a folder has a format, its tensors, and the place of their bytes.

A format is one file with a class of the protocol `Format`, listed in `source.FORMATS`. Every format presents its
tensors as the safetensors files that a rewritten checkpoint contains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from memopt.checkpoint.sources.header import Header, TensorInfo
from memopt.environment.files import parse_json
from memopt.errors import ModelError

#: Names of the files that are written, and of safetensors checkpoints.
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MAX_SHARDS = 10_000


@dataclass(frozen=True)
class Shard:
    """One safetensors file that exists or (from another format) that would be written."""

    name: str
    header: Header
    origin: Path
    """File of the source that holds the tensors."""


@dataclass(frozen=True)
class Weights:
    """The weights of an opened checkpoint. Only headers have been read; tensors are read on demand, in ranges."""

    shards: tuple[Shard, ...]
    """All files, in the order of their names."""
    index: bytes | None
    """Content of the shard index; None for a single file."""
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Tensor -> the other tensors that share its storage."""
    copies_as_is: ClassVar[bool]
    """Whether each shard's `origin` has the layout of its header, so that bytes can be copied file to file."""

    def read_into(self, buffer: memoryview, info: TensorInfo, start: int) -> None:
        """Fill `buffer` with the bytes of a tensor from `start` on, in the safetensors layout. Raises a ModelError if
        the file cannot be read, or became shorter."""
        raise NotImplementedError


class Format(Protocol):
    """One format of weight files."""

    suffix: str
    """Suffix of its files; an index file has this suffix and ``.index.json``."""
    runs_code: bool
    """Whether opening such a file can run code, so that the user has to allow it."""

    def is_in(self, root: Path) -> bool:
        """Whether the folder has weights in this format under the names that transformers looks for."""

    def open(self, root: Path) -> Weights:
        """The weights of a folder that has this format; a ModelError if a file is missing, damaged or of another."""


def parse_index(path: Path, content: bytes) -> dict[str, str]:
    """Tensor name -> file name of a shard index."""
    try:
        index = parse_json(content)
        weight_map = index["weight_map"]
        valid = isinstance(index["metadata"], dict) and all(map(_is_name, weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        valid = False
    if not valid or not weight_map:
        advice = "Download or copy it again; transformers loads it by its 'metadata' and its 'weight_map'."
        raise ModelError(f"'{path}' is not a valid shard index.", advice)
    return dict(weight_map)


def named_shards(index: Path, weight_map: Mapping[str, str]) -> list[Path]:
    """The files that an index names, in order; a ModelError if one is missing."""
    paths = [index.parent / name for name in sorted(set(weight_map.values()))]
    if len(paths) > _MAX_SHARDS:
        raise ModelError(f"'{index}' names {len(paths):,} shards; memopt reads at most {_MAX_SHARDS:,}.")
    for path in paths:
        if not path.is_file():
            raise ModelError(
                f"'{index}' names the shard '{path.name}', which is missing.", "Download or copy it again."
            )
    return paths


def _is_name(value: Any) -> bool:
    """Whether `value` is the name of a file, without a folder."""
    is_text = isinstance(value, str) and value.isprintable() and 0 < len(value.encode()) < 256
    return is_text and value == Path(value).name
