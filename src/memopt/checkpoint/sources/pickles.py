"""Checkpoints in torch's pickle format, presented as the safetensors files they will become.

They are loaded with ``weights_only=True`` (no code runs) and memory-mapped, so that opening one reads
no tensor. Used only with ``--allow-pickle``.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from memopt.checkpoint.sources.header import build_header
from memopt.errors import ModelError

if TYPE_CHECKING:
    from memopt.checkpoint.sources.source import Shard

_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32",
    torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


@dataclass(frozen=True)
class PickledTensors:
    """Tensors of one or more pickle files, with the layout of the safetensors files that replace them."""

    tensors: Mapping[str, torch.Tensor]
    shards: tuple[Shard, ...]
    index: bytes | None
    aliases: Mapping[str, tuple[str, ...]]

    def read_range(self, name: str, start: int, stop: int) -> bytearray:
        """Bytes [start, stop) of the contiguous tensor `name`."""
        flat = self.tensors[name].reshape(-1).view(torch.uint8)
        return bytearray(flat[start:stop].numpy())


def load_pickles(files: list[Path]) -> PickledTensors:
    """Memory-map pickle files and lay them out as safetensors files.

    Raises:
        ModelError: a file is damaged, needs code to load, or holds something other than dense tensors.
    """
    from memopt.checkpoint.sources.source import Shard

    tensors: dict[str, torch.Tensor] = {}
    shards = []
    for path in files:
        found = _load(path)
        name = path.name.replace("pytorch_model", "model").replace(".bin", ".safetensors")
        layout = {key: (_NAMES[tensor.dtype], tuple(tensor.shape)) for key, tensor in found.items()}
        shards.append(Shard(name, build_header(name, layout), path))
        tensors.update(found)
    if sum(len(shard.header.tensors) for shard in shards) != len(tensors):
        raise ModelError(f"The shards in '{files[0].parent}' contain a tensor twice.")
    return PickledTensors(tensors, tuple(shards), _index(shards) if len(shards) > 1 else None, _aliases(tensors))


def _load(path: Path) -> dict[str, torch.Tensor]:
    try:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # the format before torch 1.6 cannot be mapped
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise ModelError(
            f"'{path}' needs code to be run while it is opened, or is damaged.",
            "Convert it to safetensors where you trust it.",
        ) from None
    except (RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        raise ModelError(f"'{path}' cannot be read: {str(error).splitlines()[0] if str(error) else error!r}.") from None
    if not isinstance(content, Mapping):
        raise ModelError(f"'{path}' does not hold a state dict.")
    for name, value in content.items():
        dense = isinstance(value, torch.Tensor) and value.layout is torch.strided and value.dtype in _NAMES
        if not isinstance(name, str) or not dense:
            raise ModelError(f"'{path}' holds '{name}', which is not a plain tensor.")
    return dict(content)


def _index(shards: list[Shard]) -> bytes:
    infos = [info for shard in shards for info in shard.header.tensors.values()]
    content = {
        "metadata": {"total_size": sum(info.nbytes for info in infos)},
        "weight_map": {info.name: info.shard for info in sorted(infos, key=lambda info: info.name)},
    }
    return (json.dumps(content, indent=2) + "\n").encode()


def _aliases(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, ...]]:
    groups: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            groups.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    return {name: tuple(n for n in group if n != name) for group in groups.values() if len(group) > 1 for name in group}
