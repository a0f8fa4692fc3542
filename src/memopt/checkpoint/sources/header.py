"""Headers of safetensors files: reading and checking one, and building a new one.

A file is an 8-byte little-endian length, a JSON header of that length and the tensors' bytes without gaps.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memopt.environment.files import MAX_JSON_BYTES, check_side_file, once, parse_json
from memopt.errors import ModelError

if TYPE_CHECKING:
    import torch

#: Every dtype of the format -> bits of one element, and its name in torch; empty if torch has none.
_DTYPES = {
    "BOOL": (8, "bool"), "U8": (8, "uint8"), "I8": (8, "int8"), "U16": (16, "uint16"), "I16": (16, "int16"),
    "U32": (32, "uint32"), "I32": (32, "int32"), "U64": (64, "uint64"), "I64": (64, "int64"), "F64": (64, "float64"),
    "F32": (32, "float32"), "F16": (16, "float16"), "BF16": (16, "bfloat16"), "C64": (64, "complex64"),
    "F8_E5M2": (8, "float8_e5m2"), "F8_E4M3": (8, "float8_e4m3fn"), "F8_E8M0": (8, "float8_e8m0fnu"),
    "F8_E5M2FNUZ": (8, "float8_e5m2fnuz"), "F8_E4M3FNUZ": (8, "float8_e4m3fnuz"),
    "F6_E2M3": (6, ""), "F6_E3M2": (6, ""), "F4": (4, ""),
}  # fmt: skip
DTYPE_BITS = {dtype: bits for dtype, (bits, _) in _DTYPES.items()}
#: Dtypes that hold a weight's value itself. Narrower ones are codes with a scale in another tensor.
FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
#: The most tensors of a checkpoint, all files together; a model with 384 experts in each of 60 layers has 70,000.
MAX_TENSORS = 200_000
_MAX_RANK, _MAX_ELEMENTS = 64, 2**63 - 1


@dataclass(frozen=True)
class TensorInfo:
    """Dtype, shape and position of one tensor in a file."""

    name: str
    shard: str
    """Name of the file that holds it."""
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """First byte, counted from the start of the file."""
    nbytes: int


@dataclass(frozen=True)
class Header:
    """A checked header."""

    raw: bytes
    """The file's first bytes, up to the first tensor."""
    metadata: Mapping[str, str]
    tensors: Mapping[str, TensorInfo]
    file_size: int


def read_header(path: Path) -> Header:
    """Header of a safetensors file. Raises a ModelError if the file is truncated, its header is no valid JSON, or its
    offsets overlap, leave gaps or pass the end of the file."""
    check_side_file(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
            if length < 0 or length > size - 8:
                raise _broken(path, f"its header does not fit into its {size} bytes")
            if length > MAX_JSON_BYTES:
                raise _too_large(path, f"has a header of {length:,} bytes")
            text = file.read(length)
    except OSError as error:
        raise ModelError(f"'{path}' cannot be read: {error.strerror or error}.") from None
    entries = _parse(path, text)
    if len(entries) > MAX_TENSORS:
        raise _too_large(path, f"has {len(entries):,} tensors")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _broken(path, "its metadata is not a mapping of texts")
    start = 8 + length
    tensors = {name: _tensor(path, name, entry, start) for name, entry in entries.items()}
    _check_layout(path, tensors.values(), start, size)
    return Header(raw=prefix + text, metadata=metadata, tensors=tensors, file_size=size)


def read_headers(paths: Iterable[Path]) -> list[Header]:
    """Headers of the shards of one checkpoint; a ModelError if one is damaged, or all together are too large."""
    found = []
    tensors = size = 0
    for path in paths:
        found.append(read_header(path))
        tensors, size = tensors + len(found[-1].tensors), size + len(found[-1].raw)
        if tensors > MAX_TENSORS or size > MAX_JSON_BYTES:
            raise _too_large(path.parent, f"has over {tensors:,} tensors and {size:,} bytes of headers")
    return found


def build_header(shard: str, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> Header:
    """Header for a new file with `tensors` (name -> dtype and shape), widest elements first for alignment."""
    order = sorted(tensors, key=lambda name: (-DTYPE_BITS[tensors[name][0]], name))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name in order:
        dtype, shape = tensors[name]
        end = position + _nbytes(dtype, shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    infos = {}
    for name in order:
        begin, end = entries[name]["data_offsets"]
        infos[name] = TensorInfo(name, shard, *tensors[name], offset=start + begin, nbytes=end - begin)
    return Header(struct.pack("<Q", len(text)) + text, entries["__metadata__"], infos, start + position)


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype for a safetensors dtype; a ModelError if torch has none (the sub-byte formats)."""
    import torch

    found = getattr(torch, _DTYPES.get(name, (0, ""))[1], None)
    if not isinstance(found, torch.dtype):
        raise ModelError(f"torch has no dtype for the safetensors dtype {name}.")
    return found


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        entries = parse_json(text, once)
    except ValueError as error:
        raise _broken(path, f"its header is not valid JSON ({error})") from None
    if not isinstance(entries, dict):
        raise _broken(path, "its header is not a JSON object")
    return entries


def _tensor(path: Path, name: str, entry: Any, start: int) -> TensorInfo:
    if not name or not name.isprintable():
        raise _broken(path, f"it has a tensor with the name {name[:80]!a}")
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        whole = len(shape) <= _MAX_RANK and all(
            type(n) is int and 0 <= n <= _MAX_ELEMENTS for n in (*shape, begin, end)
        )
    except (TypeError, KeyError, ValueError):
        raise _broken(path, f"the entry of tensor '{name}' is incomplete") from None
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _broken(path, f"tensor '{name}' has the unknown dtype {ascii(dtype)[:40]}")
    if not whole or prod(filter(None, shape)) > _MAX_ELEMENTS or end - begin != _nbytes(dtype, shape):
        raise _broken(path, f"tensor '{name}' has offsets that do not match its dtype and shape")
    return TensorInfo(name, path.name, dtype, shape, start + begin, end - begin)


def _check_layout(path: Path, tensors: Iterable[TensorInfo], start: int, size: int) -> None:
    position = start
    for info in sorted(tensors, key=lambda info: (info.offset, info.nbytes)):
        if info.offset < position:
            raise _broken(path, f"tensor '{info.name}' overlaps the one before it")
        if info.offset > position:
            raise _broken(path, f"there is a gap before tensor '{info.name}'")
        position = info.offset + info.nbytes
        if position > size:
            raise _broken(path, f"tensor '{info.name}' ends at byte {position}, past the end of the file ({size})")
    if position != size:
        raise _broken(path, f"its tensors end at byte {position} and the file at byte {size}")


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return -(-prod(shape) * DTYPE_BITS[dtype] // 8)


def _too_large(path: Path, what: str) -> ModelError:
    most = f"memopt reads at most {MAX_TENSORS:,} tensors and {MAX_JSON_BYTES:,} bytes of headers"
    return ModelError(f"'{path}' {what}; {most}.", "Save the model again with save_pretrained.")


def _broken(path: Path, why: str) -> ModelError:
    return ModelError(f"'{path}' is not a valid safetensors file: {why}.", "Download or copy it again.")
