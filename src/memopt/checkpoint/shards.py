"""One shard, streamed: unchanged bytes are copied inside the operating system, changed tensors in blocks of 8 MiB.

Dtypes and shapes do not change, so neither does the header. No file is ever held in memory.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path

import torch

from memopt.checkpoint import arithmetic
from memopt.checkpoint.arithmetic import Pair, RangeChanges
from memopt.checkpoint.fold import Fill, Operation, Scale, Shift
from memopt.checkpoint.sources.base import Shard
from memopt.checkpoint.sources.header import TensorInfo, torch_dtype
from memopt.checkpoint.sources.source import CheckpointSource
from memopt.checkpoint.tiles import tiles, view3

_BLOCK = 8 << 20
_COPY = 64 << 20
_UNSUPPORTED = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)
Advance = Callable[[int], None]


def write_shard(
    source: CheckpointSource, shard: Shard, operations: Mapping[str, Operation], path: Path, advance: Advance
) -> dict[str, RangeChanges]:
    """Write `shard` of `source` to `path` with `operations` applied.

    Args:
        operations: tensor name -> operation; other names than the shard's are ignored.
        advance: called with the number of bytes written since the last call; may raise to stop.

    Returns:
        Changed tensor -> how many of its elements left the normal range.
    """
    changes: dict[str, RangeChanges] = {}
    with open(path, "wb", buffering=0) as file:
        target = file.fileno()
        os.truncate(target, shard.header.file_size)
        write_at(target, shard.header.raw, 0)
        advance(len(shard.header.raw))
        for run in _runs(shard, operations):
            operation = operations.get(run[0].name)
            if operation is None:
                copy_tensors(source, shard, run, target, advance)
            else:
                changes[run[0].name] = _apply(source, run[0], operation, target, advance)
        os.fsync(target)
    return changes


def restore(source: CheckpointSource, names: frozenset[str], folder: Path) -> None:
    """Overwrite the tensors `names` in the shards written to `folder` with the source's bytes."""
    for shard in source.shards:
        wanted = [info for name, info in shard.header.tensors.items() if name in names]
        if wanted:
            with open(folder / shard.name, "r+b", buffering=0) as file:
                for info in wanted:
                    copy_tensors(source, shard, [info], file.fileno(), lambda count: None)
                os.fsync(file.fileno())


def copy_tensors(source: CheckpointSource, shard: Shard, run: list[TensorInfo], target: int, advance: Advance) -> None:
    """Copy adjacent tensors unchanged."""
    if source.weights.copies_as_is:
        with open(shard.origin, "rb", buffering=0) as origin:
            count = sum(info.nbytes for info in run)
            copy_range(origin.fileno(), target, run[0].offset, count, advance)
        return
    for info in run:
        for start in range(0, info.nbytes, _BLOCK):
            block = source.read_range(info.name, start, min(start + _BLOCK, info.nbytes))
            write_at(target, block, info.offset + start)
            advance(len(block))


def copy_range(origin: int, target: int, offset: int, count: int, advance: Advance) -> None:
    """Copy `count` bytes at `offset` between two files, by `copy_file_range` where the system has it."""
    end, in_kernel = offset + count, hasattr(os, "copy_file_range")
    while offset < end:
        size = min(end - offset, _COPY if in_kernel else _BLOCK)
        if in_kernel:
            try:
                done = os.copy_file_range(origin, target, size, offset, offset)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                done = 0
            if done == 0:  # some file systems report nothing instead of an error
                in_kernel = False
                continue
        else:
            block = os.pread(origin, size, offset)
            if not block:
                raise OSError(errno.EIO, "the source became shorter while it was read")
            write_at(target, block, offset)
            done = len(block)
        offset += done
        advance(done)


def write_at(descriptor: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    """Write all of `data` at `offset`."""
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


def _runs(shard: Shard, operations: Mapping[str, Operation]) -> list[list[TensorInfo]]:
    """Tensors in file order; adjacent unchanged ones in one list."""
    runs: list[list[TensorInfo]] = []
    growing = False
    for info in sorted(shard.header.tensors.values(), key=lambda info: (info.offset, info.nbytes)):
        if not info.nbytes:
            continue
        unchanged = info.name not in operations
        if unchanged and growing:
            runs[-1].append(info)
        else:
            runs.append([info])
        growing = unchanged
    return runs


def _apply(
    source: CheckpointSource, info: TensorInfo, operation: Operation, target: int, advance: Advance
) -> RangeChanges:
    changes = RangeChanges()
    if isinstance(operation, Fill):
        filled = torch.full(info.shape, operation.value, dtype=torch_dtype(info.dtype))
        write_at(target, _bytes(filled), info.offset)
        advance(info.nbytes)
    elif isinstance(operation, Scale):
        _scale(source, info, operation, target, advance, changes)
    else:
        before = source.read(info.name)
        after = shifted(source, before, operation)
        changes.count(before, after)
        write_at(target, _bytes(after), info.offset)
        advance(info.nbytes)
    return changes


def _scale(
    source: CheckpointSource, info: TensorInfo, operation: Scale, target: int, advance: Advance, changes: RangeChanges
) -> None:
    size = info.shape[operation.axis]
    scale = torch.ones(size, dtype=torch.float64)
    for part in operation.parts:
        scale = scale * arithmetic.fold_scale(source.read(part.gamma), part.offset, size, part.channels)
    for piece, start, block in blocks(source, info, operation.axis):
        result = arithmetic.scale_tile(block, scale[piece[1]])
        changes.count(block, result)
        data = _bytes(result)
        write_at(target, data, info.offset + start)
        advance(len(data))


def shifted(source: CheckpointSource, bias: torch.Tensor, operation: Shift) -> torch.Tensor:
    """The stored `bias` plus every product of `operation`, rounded once."""
    total: Pair | None = None
    for part in operation.parts:
        info = source.tensors[part.weight]
        outer, size, inner = view3(info.shape, part.axis)
        shift = arithmetic.fold_shift(source.read(part.beta), size, part.channels, part.scale)
        pair = arithmetic.zero_pair(outer, inner)
        for piece, _, block in blocks(source, info, part.axis):
            arithmetic.accumulate(pair, piece, arithmetic.contract_tile(block, shift[piece[1]]))
        product = arithmetic.per_output(pair, bias.numel())
        total = product if total is None else arithmetic.add_pairs(total, product)
    return bias if total is None else arithmetic.finish_bias(bias, total)


def blocks(
    source: CheckpointSource, info: TensorInfo, axis: int
) -> Iterator[tuple[tuple[slice, slice, slice], int, torch.Tensor]]:
    """(slices, first byte, values) of consecutive blocks of a tensor, viewed as (before axis, axis, after axis)."""
    dtype = torch_dtype(info.dtype)
    shape = view3(info.shape, axis)
    start = 0
    for piece in tiles(shape, _BLOCK // dtype.itemsize):
        extent = [part.stop - part.start for part in piece]
        stop = start + prod(extent) * dtype.itemsize
        yield piece, start, torch.frombuffer(source.read_range(info.name, start, stop), dtype=dtype).reshape(extent)
        start = stop


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
