"""The bytes that PyTorch's CUDA caching allocator reserves for a sequence of allocations and frees.

The rules and constants of c10/cuda/CUDACachingAllocator.cpp: requests are rounded to 512 bytes; small ones (up to
1 MiB) come from segments of 2 MiB, those below 10 MiB from segments of 20 MiB, larger ones from segments of their own,
rounded to 2 MiB. A request takes the smallest free block that holds it; the rest of the block is split off, and free
neighbours are joined. With ``expandable_segments`` each of the two pools is one segment that grows at its end. If the
device has no room for a new segment, all segments without tensors are released first (``release_cached_blocks``). There
is one stream.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain

from memopt.trace.events import Event, Storage

_ROUND = 512
_SMALL = 1 << 20
_SMALL_SEGMENT = 2 << 20
_LARGE_SEGMENT = 20 << 20
_LEAST_OWN = 10 << 20
_ROUND_OWN = 2 << 20
#: The most limits that are tried to find one on which steps fit, and then a smaller one.
_TRIES, _BISECTIONS = 10, 3
#: First addresses of the two pools. Addresses identify segments and blocks, as on a device.
SMALL_POOL, LARGE_POOL = 1 << 46, 1 << 47
#: Bits of an address, and a number with all of them.
_ADDRESS_BITS = 48
_ADDRESS = (1 << _ADDRESS_BITS) - 1


def rounded(nbytes: int) -> int:
    """Bytes of the block that holds a tensor of `nbytes`."""
    return max(_ROUND, -(-nbytes // _ROUND) * _ROUND)


def reserved(
    resident: Iterable[Storage],
    events: Sequence[Event],
    *,
    expandable: bool = False,
    steps: int = 2,
    limit: int | None = None,
) -> int:
    """The most bytes of segments that the allocator holds during `steps` equal steps.

    Args:
        resident: storages that are allocated before the first step and never freed.
        events: one step, which frees everything that it allocates.
        expandable: with ``expandable_segments:True``.
        steps: number of steps; the first begins with empty pools, later ones with the segments of earlier ones.
        limit: bytes of the device. Unused segments are released before all segments exceed it; if that is not enough,
            the limit is raised to the bytes that are needed. None: a device with room for every segment.
    """
    allocator = Allocator(expandable=expandable, limit=limit)
    for storage in resident:
        allocator.allocate(storage)
    for storage, allocated, _ in list(events) * steps:
        (allocator.allocate if allocated else allocator.free)(storage)
    return allocator.most


def least_limit(resident: Sequence[Storage], events: Sequence[Event], *, expandable: bool = False) -> int:
    """The fewest bytes of a device on which two steps fit, or little more.

    On a larger device segments are released later, so that the steps may not fit it. So this runs the steps with their
    live bytes as the limit, then with the smallest limit that changes a release, and so on, in strides that double from
    0.4 % of the live bytes. Then it tries `_BISECTIONS` limits between the first that is enough and the one before it.
    If none is enough, it is the device with room for every segment.
    """
    live = max(accumulate((event.change for event in events), initial=sum(each.nbytes for each in resident)))
    limit = low = live
    for number in range(_TRIES):
        most, higher = _most(Allocator(expandable=expandable, limit=limit), resident, events)
        if most is not None:
            break
        low, limit = higher, max(higher, live + (live >> 8 << number))
    else:
        return reserved(resident, events, expandable=expandable)
    limit = low
    for _ in range(_BISECTIONS):
        if limit >= most:
            break
        less, higher = _most(Allocator(expandable=expandable, limit=limit), resident, events)
        most, low = (most, higher) if less is None else (less, low)
        limit = (low + most) // 2
    return most


def _most(allocator: Allocator, resident: Iterable[Storage], events: Sequence[Event]) -> tuple[int | None, int]:
    """The bytes that two steps hold, or None if they do not fit; then they fit on no device below the second number."""
    for storage in resident:
        allocator.allocate(storage)
    for storage, allocated, _ in chain(events, events):
        if not allocated:
            allocator.free(storage)
        elif allocator.allocate(storage) and allocator.next is not None and allocator.most >= allocator.next:
            return None, allocator.next
    return allocator.most, 0


class Allocator:
    """The two pools of one device; a storage of 0 bytes takes no block."""

    def __init__(self, *, expandable: bool = False, limit: int | None = None) -> None:
        self.limit = limit
        self.most = 0
        """The most bytes of all segments at once."""
        self.next: int | None = None
        """The smallest limit with which a segment would not have been released; None if none was."""
        self._pools = (_Pool(_SMALL_SEGMENT, expandable, SMALL_POOL), _Pool(_LARGE_SEGMENT, expandable, LARGE_POOL))
        self._blocks: dict[Storage, _Block] = {}

    @property
    def reserved(self) -> int:
        """Bytes of all segments."""
        return sum(pool.reserved for pool in self._pools)

    def allocate(self, storage: Storage) -> int:
        """Allocate a block for `storage`; returns its address."""
        if not storage.nbytes:
            return 0
        size = rounded(storage.nbytes)
        pool = self._pools[size > _SMALL]
        block = self._blocks[storage] = pool.fitting(size) or self._added(pool, size)
        return block.address

    def _added(self, pool: _Pool, size: int) -> _Block:
        """A block for `size` in a new segment of `pool`, or at the end of its one that grows."""
        more = pool.more(size)
        if self.limit is not None and (wanted := self.reserved + more) > self.limit:
            for each in self._pools:
                each.release()
            if self.reserved + more < wanted:
                self.next = wanted if self.next is None else min(self.next, wanted)
        block = pool.added(size)
        self.most = max(self.most, self.reserved)
        self.limit = None if self.limit is None else max(self.limit, self.most)
        return block

    def free(self, storage: Storage) -> int:
        """Free the block of `storage`; returns its address."""
        if not storage.nbytes:
            return 0
        block = self._blocks.pop(storage)
        address = block.address
        self._pools[address >= LARGE_POOL].free(block)
        return address

    def segments(self) -> list[tuple[int, int]]:
        """(address, bytes) of each segment, in order of the address."""
        return [(address, size) for pool in self._pools for address, size in pool.segments.items()]

    def blocks(self) -> list[tuple[int, int, Storage | None]]:
        """(address, bytes, storage) of each block, in order of the address; the storage of a free block is None."""
        held = {block.address: storage for storage, block in self._blocks.items()}
        found = sorted((address, block.size) for pool in self._pools for address, block in pool.at.items())
        return [(address, size, held.get(address)) for address, size in found]


@dataclass(eq=False, slots=True)
class _Block:
    """A part of a segment, linked to its neighbours."""

    address: int
    size: int
    is_free: bool = True
    before: _Block | None = None
    after: _Block | None = None

    @property
    def key(self) -> int:
        """Orders blocks by size, then by address; one number is compared faster than a pair."""
        return self.size << _ADDRESS_BITS | self.address


@dataclass(slots=True)
class _Pool:
    segment: int
    expandable: bool
    base: int
    reserved: int = 0
    end: int = 0
    """Offset of the next segment from `base`."""
    segments: dict[int, int] = field(default_factory=dict)
    """Address -> bytes."""
    _free: list[int] = field(default_factory=list)
    """Keys of the free blocks, sorted: the best fit is the first that is large enough."""
    at: dict[int, _Block] = field(default_factory=dict)
    """Address -> block."""
    _last: _Block | None = None
    """The block at the end of an expandable segment."""

    def fitting(self, size: int) -> _Block | None:
        """The smallest free block that holds `size`, or its part of this size; None if no free block is so large."""
        free = self._free
        place = bisect_left(free, size << _ADDRESS_BITS)
        return self._used(self.at[free.pop(place) & _ADDRESS], size) if place < len(free) else None

    def added(self, size: int) -> _Block:
        """A block of `size` in a new segment, or at the end of the segment that grows."""
        return self._used(self._grown(size) if self.expandable else self._segment(self._segment_of(size)), size)

    def _used(self, block: _Block, size: int) -> _Block:
        rest = block.size - size
        # A large block is split only if more than 1 MiB of it is left (should_split).
        if rest > _SMALL or (rest >= _ROUND and (self.expandable or self.segment == _SMALL_SEGMENT)):
            self._split(block, size)
        block.is_free = False
        return block

    def more(self, size: int) -> int:
        """Bytes of the new segment for a block of `size`; 1 if a segment grows."""
        return 1 if self.expandable else self._segment_of(size)

    def release(self) -> None:
        """Release the segments that hold no tensor, unless they are expandable."""
        for key in () if self.expandable else tuple(self._free):
            size, address = key >> _ADDRESS_BITS, key & _ADDRESS
            if self.segments.get(address) == size:
                self._free.remove(key)
                del self.at[address], self.segments[address]
                self.reserved -= size

    def free(self, block: _Block) -> None:
        block.is_free = True
        if block.after is not None and block.after.is_free:
            self._forget(block.after)
            self._join(block, block.after)
        if block.before is not None and block.before.is_free:
            self._forget(block.before)
            block = block.before
            assert block.after is not None
            self._join(block, block.after)
        insort(self._free, block.key)

    def _join(self, block: _Block, after: _Block) -> None:
        del self.at[after.address]
        block.size += after.size
        block.after = after.after
        if block.after is not None:
            block.after.before = block
        if self._last is after:
            self._last = block

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.address + size, block.size - size, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        if self._last is block:
            self._last = rest
        block.size, block.after = size, rest
        self.at[rest.address] = rest
        insort(self._free, rest.key)

    def _segment_of(self, size: int) -> int:
        if self.segment == _SMALL_SEGMENT or size < _LEAST_OWN:
            return self.segment
        return -(-size // _ROUND_OWN) * _ROUND_OWN

    def _grown(self, size: int) -> _Block:
        last = self._last
        missing = size - (last.size if last is not None and last.is_free else 0)
        added = self._segment(-(-missing // self.segment) * self.segment)
        added.before = last
        if last is None:
            return added
        last.after = added
        if not last.is_free:
            return added
        self._forget(last)
        self._join(last, added)
        return last

    def _segment(self, nbytes: int) -> _Block:
        block = _Block(self.base + self.end, nbytes)
        segment = self.base if self.expandable else block.address
        self.end += nbytes
        self.reserved += nbytes
        self.segments[segment] = self.segments.get(segment, 0) + nbytes
        self.at[block.address] = self._last = block
        return block

    def _forget(self, block: _Block) -> None:
        del self._free[bisect_left(self._free, block.key)]
