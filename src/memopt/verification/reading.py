"""Reads both checkpoints once, to hash their files and to compare them tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from memopt.checkpoint.digests import BLOCK, Digests
from memopt.checkpoint.fold import Operation
from memopt.checkpoint.sources.base import Shard
from memopt.checkpoint.sources.source import CheckpointSource
from memopt.verification.recompute import Comparison, TensorComparison


@dataclass(frozen=True)
class Reading:
    """Hashes of the weight files of both checkpoints, and comparisons of their tensors."""

    digests: dict[Path, str]
    """SHA-256 of the patched shards, and of the source's that have the same layout."""
    comparisons: dict[str, TensorComparison]
    """Tensor -> its comparison, for every tensor that both have in the same dtype and shape."""


def read_both(source: CheckpointSource, patched: CheckpointSource, operations: Mapping[str, Operation]) -> Reading:
    """Read and compare; `operations`: tensor -> the operation on it; all other tensors are unchanged."""
    reading = Reading({}, {})
    with ThreadPoolExecutor(2, thread_name_prefix="memopt") as pool:
        for part in pool.map(lambda shard: _read(source, patched, shard, operations), patched.shards):
            reading.digests.update(part.digests)
            reading.comparisons.update(part.comparisons)
    return reading


def _read(
    source: CheckpointSource, patched: CheckpointSource, shard: Shard, operations: Mapping[str, Operation]
) -> Reading:
    twin = next((other for other in source.shards if (other.name, other.header) == (shard.name, shard.header)), None)
    hashed = twin is not None and source.weights.copies_as_is
    comparisons: dict[str, TensorComparison] = {}
    with Digests() as digests:
        digests.update(memoryview(shard.header.raw))
        for info in sorted(shard.header.tensors.values(), key=lambda info: (info.offset, info.nbytes)):
            original = source.tensors.get(info.name)
            alike = original is not None and (original.dtype, original.shape) == (info.dtype, info.shape)
            # A tensor that the source lacks, or has in another layout, is hashed only.
            comparison = Comparison(
                source if alike else patched, info.name, operations.get(info.name) if alike else None
            )
            for piece, start, stop in comparison.pieces(BLOCK):
                after, before = digests.buffers(stop - start)
                patched.weights.read_into(after, info, start)
                if not alike or original is None:
                    digests.update(after)
                    continue
                source.weights.read_into(before, original, start)
                digests.update(after, before if hashed else None)
                comparison.add(piece, start, before, after)
            if alike:
                comparisons[info.name] = comparison.result
        mine, theirs = digests.hex()
    found = {shard.origin: mine}
    if hashed and twin is not None:
        found[twin.origin] = theirs
    return Reading(found, comparisons)
