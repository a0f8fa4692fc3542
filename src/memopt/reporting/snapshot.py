"""A predicted step as a memory snapshot for PyTorch's viewer (pytorch.org/memory_viz).

The format is that of ``torch.cuda.memory._dump_snapshot``, as ``torch.cuda._memory_viz`` and
torch/utils/viz/MemoryViz.js read it: a pickle of plain lists and dicts, of a protocol up to 4.
"""

from __future__ import annotations

import pickle
import sys
from bisect import bisect_left
from typing import Any

from memopt.prediction.allocator import LARGE_POOL, Allocator, allocations
from memopt.prediction.peak import Prediction
from memopt.trace.events import Storage

_PROTOCOL = 4


def snapshot(*predictions: Prediction) -> bytes:
    """The second step of each prediction, each on a device of its own. Storages that live throughout the step are in
    the segments, as if recording began after the first step."""
    devices = [_Device(number, prediction) for number, prediction in enumerate(predictions)]
    found = {
        "device_traces": [device.trace for device in devices],
        "segments": [segment for device in devices for segment in device.segments],
    }
    return pickle.dumps(found, protocol=_PROTOCOL)


class _Device:
    def __init__(self, number: int, prediction: Prediction) -> None:
        self.trace: list[dict[str, Any]] = []
        self._frames: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        allocator = Allocator(expandable=prediction.setup.expandable_segments)
        allocator.run((*allocations(prediction.resident), *prediction.events))
        self._known = dict(allocator.segments())
        for event in prediction.events:
            storage, before = event.storage, allocator.reserved
            if not storage.nbytes:
                continue
            if event.allocated:
                allocator.run([event])
                address = allocator.address(storage)
                if allocator.reserved > before:
                    self._grown(allocator)
                self._record("alloc", address, storage)
            else:
                address = allocator.address(storage)
                allocator.run([event])
                self._record("free_requested", address, storage)
                self._record("free_completed", address, storage)
        blocks = allocator.blocks()
        self.segments = [self._segment(number, blocks, *each) for each in allocator.segments()]

    def _record(self, action: str, address: int, storage: Storage) -> None:
        event = {"action": action, "addr": address, "size": storage.nbytes, "stream": 0}
        self.trace.append({**event, "frames": self._frames_of(storage)})

    def _grown(self, allocator: Allocator) -> None:
        for address, size in allocator.segments():
            old = self._known.get(address, 0)
            if size > old:
                self._known[address] = size
                event = {"action": "segment_map" if old else "segment_alloc", "addr": address + old, "size": size - old}
                self.trace.append({**event, "stream": 0, "frames": []})

    def _segment(
        self, number: int, blocks: list[tuple[int, int, Storage | None]], address: int, size: int
    ) -> dict[str, Any]:
        first, last = (bisect_left(blocks, at, key=lambda block: block[0]) for at in (address, address + size))
        inside = blocks[first:last]
        allocated = sum(nbytes for _, nbytes, storage in inside if storage is not None)
        return {
            "device": number,
            "address": address,
            "total_size": size,
            "allocated_size": allocated,
            "active_size": allocated,
            "requested_size": sum(storage.nbytes for _, _, storage in inside if storage is not None),
            "stream": 0,
            "segment_type": "small" if address < LARGE_POOL else "large",
            "frames": [],
            "blocks": [
                {
                    "address": at,
                    "size": nbytes,
                    "requested_size": nbytes if storage is None else storage.nbytes,
                    "state": "inactive" if storage is None else "active_allocated",
                    "frames": [] if storage is None else self._frames_of(storage),
                }
                for at, nbytes, storage in inside
            ],
        }

    def _frames_of(self, storage: Storage) -> list[dict[str, Any]]:
        """The text of a block in the viewer: its purpose, the operator and the module."""
        key = (storage.part, storage.operation, storage.module)
        names = ((storage.part, "part"), (storage.operation, "operation"), (storage.module, "module"))
        # Interned, so that the file has the same bytes whether a fork or this process traced the step.
        found = [{"filename": kind, "line": 0, "name": sys.intern(name)} for name, kind in names if name]
        return self._frames.setdefault(key, found)
