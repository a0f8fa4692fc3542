"""Inputs of checkpointed blocks, and kept outputs of their attention, in CPU memory until the block runs again.

Non-reentrant checkpointing saves a block's input as a saved tensor, so a pair of hooks around the block moves it.
Copies run on a stream of their own. In backward, while one block runs, the tensors of the block before it are already
being copied back, so those of two blocks at most are on the device. Peers: `torch.autograd.graph.save_on_cpu`, which
copies on the compute stream.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from memopt.recompute.versions import check_version
from memopt.saved.kept import Kept
from memopt.torch_compat import FakeTensor

#: Stands for host memory in traces, in which fake tensors on the CPU stand for tensors on a device.
_HOST = torch.device("meta")
#: Subclasses (sharded, nested, quantised tensors) stay where they are.
_PLAIN_TYPES = (Tensor, FakeTensor)


class OffloadedInputs:
    """The offloaded tensors of one model's blocks. A copy of the model starts with none."""

    def __init__(self) -> None:
        self._last: weakref.ref[OfBlock] | None = None
        self._streams: dict[torch.device, torch.Stream] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return OffloadedInputs, ()

    def of_a_block(self) -> OfBlock:
        """The place for the tensors of one call of a block."""
        place = OfBlock(self, self._last)
        self._last = weakref.ref(place)
        return place

    def stream(self, device: torch.device) -> torch.Stream | None:
        """The stream of copies; None for CPU and meta tensors, which are copied at once."""
        if device.type in ("cpu", "meta"):
            return None
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        return self._streams[device]


class OfBlock:
    """The tensors that one call of a block keeps in CPU memory. When backward takes the first one, copies of the others
    to the device begin, and of the tensors of the block before, which runs again next."""

    __slots__ = ("__weakref__", "_before", "_inputs", "_waiting")

    def __init__(self, inputs: OffloadedInputs, before: weakref.ref[OfBlock] | None) -> None:
        self._inputs, self._before = inputs, before
        self._waiting: list[weakref.ref[_Waiting]] = []

    def hooks(self) -> saved_tensors_hooks:
        """Context manager around the checkpointing of the block: its first floating-point input goes to the CPU."""
        is_there = False

        def pack(tensor: Tensor) -> Kept | _Waiting | _Unchanged:
            nonlocal is_there
            # Before 2.13, PyTorch's checkpoint saves an empty tensor of its own first.
            is_input = tensor.is_floating_point() and tensor.numel() and type(tensor) in _PLAIN_TYPES
            if is_there or not is_input:
                return Kept(tensor)
            is_there = True
            if not keeps_layout(tensor):
                return Kept(tensor)
            is_copied_later = self._inputs.stream(tensor.device) is not None
            return _Unchanged(self.wait(tensor), tensor) if is_copied_later else self.wait(tensor)

        return saved_tensors_hooks(pack, _unpack)

    def wait(self, tensor: Tensor) -> _Waiting:
        """Copy `tensor` to CPU memory, until backward takes it."""
        waiting = _Waiting(tensor, self._inputs.stream(tensor.device), self)
        self._waiting.append(weakref.ref(waiting))
        return waiting

    def fetch(self) -> None:
        """Begin to copy every tensor back that backward has yet to take."""
        for each in self._waiting:
            if (waiting := each()) is not None:
                waiting.fetch()

    def fetch_around(self) -> None:
        """:meth:`fetch` for this block and for the block before it."""
        self.fetch()
        if self._before is not None and (before := self._before()) is not None:
            before.fetch()


def keeps_layout(tensor: Tensor) -> bool:
    """Whether a copy of `tensor` has its strides. The block's second run saves other tensors for an input without them:
    a slice, or an expanded tensor."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


class _Waiting:
    """One tensor in CPU memory."""

    __slots__ = ("__weakref__", "_device", "_fetched", "_place", "_stored", "_stream", "_was_taken")

    def __init__(self, tensor: Tensor, stream: torch.Stream | None, place: OfBlock) -> None:
        self._device, self._stream, self._place = tensor.device, stream, place
        self._fetched: Tensor | None = None
        self._was_taken = False
        if isinstance(tensor, FakeTensor):
            self._stored = tensor.detach().to(_HOST)
            return
        with torch.no_grad():
            self._stored = torch.empty_like(tensor.detach(), device="cpu", pin_memory=stream is not None)
            if stream is None:
                self._stored = self._stored.copy_(tensor).data  # an alias at version 0
                return
            stream.wait_stream(torch.accelerator.current_stream(self._device))
            with stream:
                self._stored.copy_(tensor, non_blocking=True)
            tensor.record_stream(stream)  # the allocator reuses its memory only after the copy

    def fetch(self) -> None:
        """Begin to copy the tensor back, if backward has yet to take it."""
        if not self._was_taken:
            self._fetch()

    def _fetch(self) -> None:
        if self._fetched is None and self._stream is not None:
            with torch.no_grad(), self._stream:
                self._fetched = self._stored.to(self._device, non_blocking=True)
        elif self._fetched is None and isinstance(self._stored, FakeTensor):
            self._fetched = torch.empty_like(self._stored, device=self._device)

    def take(self) -> Tensor:
        """The tensor on its device, for work on the current stream."""
        if self._stream is None and not isinstance(self._stored, FakeTensor):
            check_version(self._stored, 0)  # a block that changes its input in place cannot run again a second time
            return self._stored
        self._fetch()
        tensor, self._fetched, self._was_taken = self._fetched, None, True
        assert tensor is not None
        if self._stream is not None:
            current = torch.accelerator.current_stream(self._device)
            current.wait_stream(self._stream)
            tensor.record_stream(current)
        self._place.fetch_around()
        return tensor


class _Unchanged:
    """An input whose copy to the CPU may run while the model does: a change in place is an error in backward, as it is
    without offloading."""

    def __init__(self, waiting: _Waiting, tensor: Tensor) -> None:
        self._waiting, self._version = waiting, tensor._version
        self._witness = tensor.detach()
        self._witness.data = tensor.new_empty(0)  # it shares the version counter, and holds no memory

    def take(self) -> Tensor:
        check_version(self._witness, self._version)
        return self._waiting.take()


def _unpack(packed: Kept | _Waiting | _Unchanged) -> Tensor:
    return packed.unpack() if isinstance(packed, Kept) else packed.take()
