"""SHA-256 of two streams of blocks, each computed on its own thread while the caller goes on to the next blocks."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle

#: Bytes at a time: large enough for threads and calls to cost nothing, small enough for the cache.
BLOCK = 4 << 20
_DEPTH = 3


class Digests:
    """Two digests and their buffers; only one digest is computed as long as both streams are equal."""

    def __init__(self, block: int = BLOCK) -> None:
        self._first = hashlib.sha256()
        self._second: hashlib._Hash | None = None
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix="memopt-sha256") for _ in range(2)]
        slots: list[tuple[bytearray, bytearray, list[Future[None]]]] = [
            (bytearray(block), bytearray(block), []) for _ in range(_DEPTH)
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
