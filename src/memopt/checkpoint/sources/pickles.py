"""Checkpoints in torch's pickle format, presented as the safetensors files that are written from them.

They are loaded with ``weights_only=True`` (no code runs) and memory-mapped, so that opening one reads no tensor. Used
only with ``--allow-pickle``.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from memopt.checkpoint.sources.base import Shard, Weights, named_shards, parse_index
from memopt.checkpoint.sources.header import TensorInfo, build_header, torch_dtype
from memopt.environment.files import MAX_JSON_BYTES, read_small
from memopt.errors import ModelError

if TYPE_CHECKING:
    import torch

_SINGLE = "pytorch_model.bin"
_INDEX = "pytorch_model.bin.index.json"
#: Dtypes that are read, by their safetensors names.
_DTYPES = ("BOOL", "U8", "I8", "I16", "I32", "I64", "F64", "F32", "F16", "BF16", "C64", "F8_E4M3", "F8_E5M2")


class PickleFormat:
    """``pytorch_model.bin``, or the shards of ``pytorch_model.bin.index.json``."""

    suffix = ".bin"
    runs_code = True

    def is_in(self, root: Path) -> bool:
        return bool(_files(root))

    def open(self, root: Path) -> PickledTensors:
        """Memory-map the files and lay them out as safetensors files."""
        tensors: dict[str, torch.Tensor] = {}
        shards = []
        for path in _files(root):
            found = _load(path)
            name = path.name.replace("pytorch_model", "model").replace(".bin", ".safetensors")
            layout = {key: (_names()[tensor.dtype], tuple(tensor.shape)) for key, tensor in found.items()}
            shards.append(Shard(name, build_header(name, layout), path))
            tensors.update(found)
        if sum(len(shard.header.tensors) for shard in shards) != len(tensors):
            raise ModelError(f"The shards in '{root}' contain a tensor twice.")
        index = _index(shards) if len(shards) > 1 else None
        return PickledTensors(tuple(shards), index, _aliases(tensors), tensors=tensors)


@dataclass(frozen=True)
class PickledTensors(Weights):
    """Tensors of one or more pickle files, with the layout of the safetensors files that replace them."""

    tensors: Mapping[str, torch.Tensor] = field(kw_only=True)
    copies_as_is = False

    def read_into(self, buffer: memoryview, info: TensorInfo, start: int) -> None:
        import torch

        flat = self.tensors[info.name].reshape(-1).view(torch.uint8)
        buffer[:] = flat[start : start + len(buffer)].numpy().data


def _files(root: Path) -> list[Path]:
    single, index = root / _SINGLE, root / _INDEX
    if single.is_file() or not index.is_file():
        return [single] if single.is_file() else []
    return named_shards(index, parse_index(index, read_small(index, MAX_JSON_BYTES)))


def _names() -> dict[torch.dtype, str]:
    return {torch_dtype(name): name for name in _DTYPES}


def _load(path: Path) -> dict[str, torch.Tensor]:
    import torch

    try:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # the format before torch 1.6 cannot be mapped
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise ModelError(
            f"'{path}' runs code when it is opened, or is damaged.", "If you trust it, convert it to safetensors."
        ) from None
    except (RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        raise ModelError(f"'{path}' cannot be read: {str(error).splitlines()[0] if str(error) else error!r}.") from None
    if not isinstance(content, Mapping):
        raise ModelError(f"'{path}' does not hold a state dict.")
    dtypes = _names()
    for name, value in content.items():
        dense = isinstance(value, torch.Tensor) and value.layout is torch.strided and value.dtype in dtypes
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
