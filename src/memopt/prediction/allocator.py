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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, repeat

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
#: Bits of an address, and a number with all of them. More than a device has: a step of any size has room.
_ADDRESS_BITS = 62
_ADDRESS = (1 << _ADDRESS_BITS) - 1


def reserved(
    resident: Iterable[Storage],
    events: Sequence[Event],
    *,
    expandable: bool = False,
    limit: int | None = None,
) -> int:
    """The most bytes of segments that the allocator holds during two equal steps: the first begins with empty pools,
    the second with the segments of the first.

    Args:
        resident: storages that are allocated before the first step and never freed.
        events: one step, which frees everything that it allocates.
        expandable: with ``expandable_segments:True``.
        limit: bytes of the device. Unused segments are released before all segments exceed it; if that is not enough,
            the limit is raised to the bytes that are needed. None: a device with room for every segment.
    """
    allocator = Allocator(expandable=expandable, limit=limit)
    for each in (allocations(resident), *repeat(events, 2)):
        allocator.run(each)
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
    limit, tried = low, -1
    for _ in range(_BISECTIONS):
        if limit >= most or limit == tried:
            break
        tried = limit
        less, higher = _most(Allocator(expandable=expandable, limit=limit), resident, events)
        most, low = (most, higher) if less is None else (less, low)
        limit = (low + most) // 2
    return most


def _most(allocator: Allocator, resident: Iterable[Storage], events: Sequence[Event]) -> tuple[int | None, int]:
    """The bytes that two steps hold, or None if they do not fit; then they fit on no device below the second number."""
    allocator.run(allocations(resident))
    for _ in range(2):
        allocator.run(events, stops=True)
        if allocator.next is not None and allocator.most >= allocator.next:
            return None, allocator.next
    return allocator.most, 0


def allocations(storages: Iterable[Storage]) -> Iterator[Event]:
    """An allocation of each of `storages`."""
    return (Event(each, True, "forward") for each in storages)


class Allocator:
    """The two pools of one device; a storage of 0 bytes takes no block."""

    def __init__(self, *, expandable: bool = False, limit: int | None = None) -> None:
        self.limit = limit
        self.most = 0
        """The most bytes of all segments at once."""
        self.next: int | None = None
        """The smallest limit with which a segment would not have been released; None if none was."""
        self._pools = (_Pool(_SMALL_SEGMENT, expandable, SMALL_POOL), _Pool(_LARGE_SEGMENT, expandable, LARGE_POOL))
        self._blocks: dict[Storage, tuple[int, int]] = {}
        """Storage -> address and size of its block."""

    @property
    def reserved(self) -> int:
        """Bytes of all segments."""
        return sum(pool.reserved for pool in self._pools)

    def run(self, events: Iterable[Event], *, stops: bool = False) -> None:
        """Follow `events`; with `stops`, until the segments exceed `next`. All is in one function, because a step has
        hundreds of thousands of events."""
        blocks, (small, large) = self._blocks, self._pools
        # A large block is split only if more than 1 MiB of it is left (should_split).
        least_rest = _ROUND if large.expandable else _SMALL + 1
        for storage, allocated, _ in events:
            size = -(-storage.nbytes // _ROUND) * _ROUND
            if not size:
                continue
            if allocated:
                pool = large if size > _SMALL else small
                unused, sizes, before = pool.unused, pool.sizes, pool.before
                place = bisect_left(unused, size << _ADDRESS_BITS)
                if place == len(unused):
                    self._grow(pool, size)
                    if stops and self.next is not None and self.most >= self.next:
                        return
                    place = bisect_left(unused, size << _ADDRESS_BITS)
                key = unused.pop(place)
                address, whole = key & _ADDRESS, key >> _ADDRESS_BITS
                del sizes[address]
                if (rest := whole - size) < (_ROUND if pool is small else least_rest):
                    del before[address + whole]
                    blocks[storage] = address, whole
                    continue
                blocks[storage] = address, size
                address, size = address + size, rest
            else:
                address, size = blocks.pop(storage)
                pool = large if address >= LARGE_POOL else small
                unused, sizes, before, segments = pool.unused, pool.sizes, pool.before, pool.segments
                behind = address + size
                if behind in sizes and behind not in segments:
                    more = sizes.pop(behind)
                    del unused[bisect_left(unused, more << _ADDRESS_BITS | behind)]
                    size += more
                if address in before and address not in segments:
                    more = before.pop(address)
                    address -= more
                    del unused[bisect_left(unused, more << _ADDRESS_BITS | address)]
                    size += more
            sizes[address] = before[address + size] = size
            insort(unused, size << _ADDRESS_BITS | address)

    def address(self, storage: Storage) -> int:
        """The address of the block of `storage`."""
        return self._blocks[storage][0]

    def _grow(self, pool: _Pool, size: int) -> None:
        """Make a free block for `size` in a new segment of `pool`, or at the end of its one that grows."""
        more = 1 if pool.expandable else pool.segment_of(size)
        if self.limit is not None and (wanted := self.reserved + more) > self.limit:
            for each in self._pools:
                each.release()
            if self.reserved + more < wanted:
                self.next = wanted if self.next is None else min(self.next, wanted)
        pool.grow(size)
        self.most = max(self.most, self.reserved)
        self.limit = None if self.limit is None else max(self.limit, self.most)

    def segments(self) -> list[tuple[int, int]]:
        """(address, bytes) of each segment, in order of the address."""
        return [(address, size) for pool in self._pools for address, size in pool.segments.items()]

    def blocks(self) -> list[tuple[int, int, Storage | None]]:
        """(address, bytes, storage) of each block, in order of the address; the storage of a free block is None."""
        free: list[tuple[int, int, Storage | None]]
        free = [(address, size, None) for pool in self._pools for address, size in pool.sizes.items()]
        held = [(*block, storage) for storage, block in self._blocks.items()]
        return sorted([*free, *held], key=lambda block: block[0])


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
    unused: list[int] = field(default_factory=list)
    """The free blocks, sorted: the best fit is the first that is large enough. Each is a number: its size, and in the
    last bits its address. One number is compared faster than a pair."""
    sizes: dict[int, int] = field(default_factory=dict)
    """Address of a free block -> its size."""
    before: dict[int, int] = field(default_factory=dict)
    """Address behind a free block -> its size."""

    def grow(self, size: int) -> None:
        """Make a free block of `size` in a new segment, or at the end of the segment that grows."""
        address, nbytes, last = self.base + self.end, self.segment_of(size), 0
        segment = address
        if self.expandable:
            segment, last = self.base, self.before.pop(address, 0)
            nbytes = -(-(size - last) // self.segment) * self.segment
        self.end += nbytes
        self.reserved += nbytes
        self.segments[segment] = self.segments.get(segment, 0) + nbytes
        if last:
            self.unused.remove(last << _ADDRESS_BITS | address - last)
        self.sizes[address - last] = self.before[address + nbytes] = last + nbytes
        insort(self.unused, last + nbytes << _ADDRESS_BITS | address - last)

    def segment_of(self, size: int) -> int:
        """Bytes of the new segment for a block of `size`."""
        if self.segment == _SMALL_SEGMENT or size < _LEAST_OWN:
            return self.segment
        return -(-size // _ROUND_OWN) * _ROUND_OWN

    def release(self) -> None:
        """Release the segments that hold no tensor, unless they are expandable."""
        for key in () if self.expandable else tuple(self.unused):
            size, address = key >> _ADDRESS_BITS, key & _ADDRESS
            if self.segments.get(address) == size:
                self.unused.remove(key)
                del self.sizes[address], self.before[address + size], self.segments[address]
                self.reserved -= size
