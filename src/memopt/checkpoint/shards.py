"""Stream one shard: blocks of 4 MiB are read, folded and written, while two threads hash them.

Dtypes and shapes do not change, so neither does the header. No file is ever held in memory. Every byte of the source is
read for the digest in the manifest, so a copy inside the OS kernel would save nothing, unless files can share blocks.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import cycle
from math import prod
from pathlib import Path

import numpy as np

from memopt.checkpoint import arithmetic
from memopt.checkpoint.arithmetic import Bits, Floats, Pair, RangeChanges
from memopt.checkpoint.fold import Fill, Operation, Scale, Shift
from memopt.checkpoint.manifest import FileRecord
from memopt.checkpoint.sources.base import Shard
from memopt.checkpoint.sources.header import TensorInfo
from memopt.checkpoint.sources.source import CheckpointSource
from memopt.checkpoint.tiles import Piece, pieces, view3

#: Bytes at a time: large enough for threads and calls to cost nothing, small enough for the cache.
BLOCK = 4 << 20
_DEPTH = 3
_WRITE_BACK = 32 << 20
_FICLONE = 0x40049409  # <linux/fs.h>
Advance = Callable[[int], None]


@dataclass(frozen=True)
class WrittenShard:
    """Records of a written shard and of the file that was read for it."""

    changes: dict[str, RangeChanges]
    """Changed tensor -> how many of its elements left the normal range."""
    source: FileRecord | None
    """None if the file read is of another format."""
    result: FileRecord


def write_shard(
    source: CheckpointSource, shard: Shard, operations: Mapping[str, Operation], path: Path, advance: Advance
) -> WrittenShard:
    """Write `shard` of `source` to `path` with `operations` applied.

    Args:
        operations: tensor name -> operation; other names than the shard's are ignored.
        advance: called with the number of bytes written since the last call; may raise to stop.

    Raises:
        ModelError: the source cannot be read.
        OSError: the file cannot be written.
    """
    changes: dict[str, RangeChanges] = {}
    as_is = source.weights.copies_as_is
    with open(path, "xb", buffering=0) as file:
        cloned = as_is and _clone(shard, file.fileno())
        with Digests() as digests:
            stream = _Stream(file.fileno(), cloned, digests, advance)
            stream.put(memoryview(shard.header.raw))
            for info in _spans(shard, operations, merge=as_is):
                operation = operations.get(info.name)
                if operation is None:
                    _copy(source, info, stream)
                else:
                    changes[info.name] = _apply(source, info, operation, stream)
            read, written = digests.hex()
        os.fsync(file.fileno())
    size = shard.header.file_size
    return WrittenShard(changes, FileRecord(read, size) if as_is else None, FileRecord(written, size))


def restore(source: CheckpointSource, shard: Shard, names: frozenset[str], path: Path) -> bool:
    """Overwrite the tensors `names` in the written `shard` at `path` with the source's bytes; False if it has none."""
    wanted = [info for name, info in shard.header.tensors.items() if name in names]
    with open(path, "r+b", buffering=0) as file:
        for info in wanted:
            for start in range(0, info.nbytes, BLOCK):
                block = source.read_range(info.name, start, min(start + BLOCK, info.nbytes))
                write_at(file.fileno(), memoryview(block), info.offset + start)
        os.fsync(file.fileno())
    return bool(wanted)


def write_at(descriptor: int, view: memoryview, offset: int) -> None:
    """Write all of `view` at `offset`."""
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


class _Stream:
    """A file that is written from its start to its end."""

    def __init__(self, target: int, cloned: bool, digests: Digests, advance: Advance) -> None:
        self._target, self._cloned, self._advance = target, cloned, advance
        self._position = self._started = 0
        self._digests = digests
        self.buffers = digests.buffers

    def put(self, before: memoryview, after: memoryview | None = None) -> None:
        """Append `after`, the new form of the source's bytes `before`; None if the bytes do not change."""
        self._digests.update(before, after)
        if after is not None or not self._cloned:
            write_at(self._target, before if after is None else after, self._position)
        self._position += len(before)
        if self._position - self._started >= _WRITE_BACK:
            # Linux then starts to write these pages to the disk, and drops none of them, since they are dirty.
            os.posix_fadvise(self._target, self._started, self._position - self._started, os.POSIX_FADV_DONTNEED)
            self._started = self._position
        self._advance(len(before))


def _clone(shard: Shard, target: int) -> bool:
    """Let a new file share its blocks with the source, where the file system can (btrfs, XFS)."""
    try:
        with open(shard.origin, "rb", buffering=0) as origin:
            fcntl.ioctl(target, _FICLONE, origin.fileno())
        os.truncate(target, shard.header.file_size)
    except OSError:
        return False
    return True


def _spans(shard: Shard, operations: Mapping[str, Operation], *, merge: bool) -> Iterator[TensorInfo]:
    """Tensors in the order of the file; with `merge`, adjacent unchanged tensors are one span."""
    span: TensorInfo | None = None
    for info in sorted(shard.header.tensors.values(), key=lambda info: (info.offset, info.nbytes)):
        if info.name not in operations and merge:
            span = replace(span, nbytes=span.nbytes + info.nbytes) if span else replace(info, name="")
            continue
        if span is not None:
            yield span
        span = None
        yield info
    if span is not None:
        yield span


def _copy(source: CheckpointSource, info: TensorInfo, stream: _Stream, after: Bits | None = None) -> None:
    """Append a tensor, unchanged or with the content `after`."""
    content = None if after is None else as_bytes(after)
    for start in range(0, info.nbytes, BLOCK):
        before, _ = stream.buffers(min(BLOCK, info.nbytes - start))
        source.weights.read_into(before, info, start)
        stream.put(before, None if content is None else content[start : start + len(before)])


def _apply(source: CheckpointSource, info: TensorInfo, operation: Operation, stream: _Stream) -> RangeChanges:
    changes = RangeChanges()
    if isinstance(operation, Fill):
        _copy(source, info, stream, arithmetic.encode(np.full(info.shape, operation.value), info.dtype))
    elif isinstance(operation, Scale):
        _scale(source, info, operation, stream, changes)
    else:
        before = _bits(source, info.name)
        after = shifted(source, info.name, operation)
        changes.count(before, after, info.dtype)
        _copy(source, info, stream, after)
    return changes


def _scale(
    source: CheckpointSource, info: TensorInfo, operation: Scale, stream: _Stream, changes: RangeChanges
) -> None:
    scaler = arithmetic.Scaler(scale_of(source, operation, info.shape[operation.axis]), info.dtype)
    for piece, start, stop in _pieces(info, operation.axis):
        before, after = stream.buffers(stop - start)
        source.weights.read_into(before, info, start)
        extent = [part.stop - part.start for part in piece]
        block, result = (arithmetic.stored(view, info.dtype).reshape(extent) for view in (before, after))
        scaler(block, piece[1], result)
        changes.count(block, result, info.dtype)
        stream.put(before, after)


def shifted(source: CheckpointSource, name: str, operation: Shift) -> Bits:
    """The stored bias `name` plus every product of `operation`, rounded once."""
    bias = _bits(source, name)
    total: Pair | None = None
    for part in operation.parts:
        info = source.tensors[part.weight]
        outer, size, inner = view3(info.shape, part.axis)
        shift = arithmetic.fold_shift(read_floats(source, part.beta), part.scale, size, part.channels)
        pair = arithmetic.zero_pair(outer, inner)
        for piece, _, block in blocks(source, info, part.axis):
            arithmetic.accumulate(pair, piece, arithmetic.contract(block, info.dtype, shift[piece[1]]))
        product = arithmetic.per_output(pair, bias.size)
        total = product if total is None else arithmetic.add_pairs(total, product)
    return bias if total is None else arithmetic.finish_bias(bias, source.tensors[name].dtype, total)


def scale_of(source: CheckpointSource, operation: Scale, size: int) -> Floats:
    """The fp64 number by which each of `size` coordinates along the axis is multiplied."""
    scale = np.ones(size)
    for part in operation.parts:
        scale = scale * arithmetic.fold_scale(read_floats(source, part.gamma), part.offset, size, part.channels)
    return scale


def read_floats(source: CheckpointSource, name: str) -> Floats:
    """A whole tensor of floating-point numbers, flat, as fp64."""
    return arithmetic.decode(_bits(source, name), source.tensors[name].dtype)


def _bits(source: CheckpointSource, name: str) -> Bits:
    return arithmetic.stored(source.read_range(name), source.tensors[name].dtype)


def as_bytes(bits: Bits) -> memoryview:
    """`bits` as bytes of a file."""
    return np.ascontiguousarray(bits).reshape(-1).view(np.uint8).data


def _pieces(info: TensorInfo, axis: int) -> Iterator[tuple[Piece, int, int]]:
    shape = view3(info.shape, axis)
    return pieces(shape, info.nbytes // max(prod(shape), 1), BLOCK)


def blocks(source: CheckpointSource, info: TensorInfo, axis: int) -> Iterator[tuple[Piece, int, Bits]]:
    """(slices, first byte, stored values) of consecutive blocks of a tensor, viewed as (before axis, axis, after)."""
    for where, start, stop in _pieces(info, axis):
        bits = arithmetic.stored(source.read_range(info.name, start, stop), info.dtype)
        yield where, start, bits.reshape([part.stop - part.start for part in where])


class Digests:
    """SHA-256 of two streams, computed on threads of its own; only one digest as long as both streams are equal."""

    def __init__(self) -> None:
        self._first = hashlib.sha256()
        self._second: hashlib._Hash | None = None
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix="memopt-sha256") for _ in range(2)]
        slots: list[tuple[bytearray, bytearray, list[Future[None]]]] = [
            (bytearray(BLOCK), bytearray(BLOCK), []) for _ in range(_DEPTH)
        ]
        self._slots = cycle(slots)
        self._pending = slots[-1][2]

    def __enter__(self) -> Digests:
        return self

    def __exit__(self, *error: object) -> None:
        for thread in self._threads:
            thread.shutdown()

    def buffers(self, count: int) -> tuple[memoryview, memoryview]:
        """A buffer of `count` bytes for the next block of each stream; its old content has been hashed."""
        first, second, self._pending = next(self._slots)
        while self._pending:
            self._pending.pop().result()
        return memoryview(first)[:count], memoryview(second)[:count]

    def update(self, first: memoryview, second: memoryview | None = None) -> None:
        """Append a block to each stream; None: equal to `first`. Blocks must not change until they are hashed."""
        if second is not None and self._second is None:
            self._second = self._threads[0].submit(self._first.copy).result()
        self._pending.append(self._threads[0].submit(self._first.update, first))
        if self._second is not None:
            self._pending.append(self._threads[1].submit(self._second.update, first if second is None else second))

    def hex(self) -> tuple[str, str]:
        """The digests; nothing can be appended afterwards."""
        for thread in self._threads:
            thread.shutdown()
        return self._first.hexdigest(), (self._second or self._first).hexdigest()
