"""Checkpoints in safetensors files: one file, or shards with an index. Opening reads headers only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from memopt.checkpoint.sources.base import INDEX, SINGLE, Shard, Weights, named_shards, parse_index
from memopt.checkpoint.sources.header import Header, TensorInfo, read_header, read_headers
from memopt.environment.files import MAX_JSON_BYTES, read_small
from memopt.errors import ModelError

_LARGE = 1 << 20


class SafetensorsFormat:
    """``model.safetensors``, or the shards of ``model.safetensors.index.json``."""

    suffix = ".safetensors"
    runs_code = False

    def is_in(self, root: Path) -> bool:
        return (root / SINGLE).is_file() or (root / INDEX).is_file()

    def open(self, root: Path) -> SafetensorsFiles:
        if (root / SINGLE).is_file():
            return SafetensorsFiles((Shard(SINGLE, read_header(root / SINGLE), root / SINGLE),), None)
        path = root / INDEX
        content = read_small(path, MAX_JSON_BYTES)
        weight_map = parse_index(path, content)
        files = named_shards(path, weight_map)
        shards = [Shard(file.name, header, file) for file, header in zip(files, read_headers(files), strict=True)]
        _check_index(path, weight_map, {shard.name: shard.header for shard in shards})
        return SafetensorsFiles(tuple(shards), content)


@dataclass(frozen=True)
class SafetensorsFiles(Weights):
    """Weights in safetensors files; such a file holds no tensor twice."""

    copies_as_is = True

    def read_into(self, buffer: memoryview, info: TensorInfo, start: int) -> None:
        path = self._origins[info.shard]
        try:
            with open(path, "rb", buffering=0) as file:
                view, offset = buffer, info.offset + start
                while view:
                    if not (count := os.preadv(file.fileno(), [view], offset)):
                        raise ModelError(f"'{path}' became shorter while it was read.")
                    view, offset = view[count:], offset + count
                if len(buffer) >= _LARGE:  # part of a stream: let the disk read the next blocks meanwhile
                    end = info.offset + start + len(buffer)
                    os.posix_fadvise(file.fileno(), end, 2 * len(buffer), os.POSIX_FADV_WILLNEED)
        except OSError as error:
            raise ModelError(f"'{path}' cannot be read: {error.strerror or error}.", "Copy it again.") from None

    @cached_property
    def _origins(self) -> Mapping[str, Path]:
        return {shard.name: shard.origin for shard in self.shards}


def _check_index(path: Path, weight_map: Mapping[str, str], headers: Mapping[str, Header]) -> None:
    """Raise a ModelError unless the index names exactly the tensors of the shards."""
    for name, shard in weight_map.items():
        if name not in headers[shard].tensors:
            raise ModelError(f"'{path}' places tensor '{name}' in '{shard}', which does not contain it.")
    for shard, header in headers.items():
        for name in header.tensors:
            if weight_map.get(name) != shard:
                raise ModelError(f"'{shard}' contains tensor '{name}', which '{path}' does not list there.")
