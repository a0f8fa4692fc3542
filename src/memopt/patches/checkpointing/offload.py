"""Inputs of checkpointed blocks, and kept outputs of their attention, in CPU memory until the block runs again.

Non-reentrant checkpointing saves a block's input as a saved tensor, so a pair of hooks around the block moves it.
Copies run on a stream of their own. Only the order of streams bounds the tensors on the device: the host never waits.
In forward the compute stream waits for a copy when the next but one begins, so two tensors at most are held for their
copies. In backward, while one block runs, the tensors of the block before it are already being copied back; that
copy waits for the blocks behind, so those of two blocks at most are on the device. No memory is freed before the
compute stream has waited for its copy, so the allocator needs no `record_stream`, with which it would look for the end
of copies only when the host allocates, blocks ahead of the device. Peers: the offloading of torchtune and TRL, and
`torch.autograd.graph.save_on_cpu`, which copies on the compute stream.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from memopt.recompute.versions import check_version
from memopt.saved.host import HostCopy, are_copies_traced
from memopt.saved.kept import Kept
from memopt.torch_compat import FakeTensor

#: Stands for host memory in traces, in which fake tensors on the CPU stand for tensors on a device.
_HOST = torch.device("meta")
#: Subclasses (sharded, nested, quantised tensors) stay where they are.
_PLAIN_TYPES = (Tensor, FakeTensor)


class InputsOfThreads(threading.local):
    """The offloaded tensors of one model's blocks. A copy of the model starts with none."""

    def __init__(self, *, of_some_blocks: bool = False) -> None:
        self._of_some = of_some_blocks
        self.here = OffloadedInputs(of_some_blocks=of_some_blocks)
        """The ones of forwards in this thread; `nn.DataParallel` has a thread for each device."""

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(InputsOfThreads, of_some_blocks=self._of_some), ()


class OffloadedInputs:
    """The offloaded tensors of blocks that run one after another; `of_some_blocks`: other blocks of the model keep
    theirs on the device."""

    def __init__(self, *, of_some_blocks: bool = False) -> None:
        self.of_some = of_some_blocks
        self._last: weakref.ref[OfBlock] | None = None
        self._streams: dict[torch.device, torch.Stream] = {}
        self._leaving: deque[weakref.ref[_Waiting]] = deque()

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

    def hold(self, waiting: _Waiting) -> None:
        """Note that the copy of `waiting` to the CPU has begun; hold its tensor and the one before, free all others."""
        self.release(but=1)
        self._leaving.append(weakref.ref(waiting))

    def release(self, but: int = 0) -> None:
        """Free the tensors that are held for their copies to the CPU, but the last ones."""
        while len(self._leaving) > but:
            if (waiting := self._leaving.popleft()()) is not None:
                waiting.release()


class OfBlock:
    """The tensors that one call of a block keeps in CPU memory. When backward takes the first one, copies of the others
    to the device begin, and of the tensors of the block before, which runs again next."""

    __slots__ = ("__weakref__", "_before", "_waiting", "inputs")

    def __init__(self, inputs: OffloadedInputs, before: weakref.ref[OfBlock] | None) -> None:
        self.inputs, self._before = inputs, before
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
            is_copied_later = self.inputs.stream(tensor.device) is not None
            return _Unchanged(self.wait(tensor), tensor) if is_copied_later else self.wait(tensor)

        return saved_tensors_hooks(pack, _unpack)

    def wait(self, tensor: Tensor) -> _Waiting:
        """Copy `tensor` to CPU memory, until backward takes it."""
        stream = self.inputs.stream(tensor.device)
        waiting = _Waiting(tensor, stream, self)
        if stream is not None or (isinstance(tensor, FakeTensor) and waiting.is_held):
            self.inputs.hold(waiting)
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
    a slice, an expanded tensor, or one with rows of different lengths."""
    return not tensor.is_nested and torch.empty_like(tensor, device="meta").stride() == tensor.stride()


class _Waiting:
    """One tensor in CPU memory."""

    def __init__(self, tensor: Tensor, stream: torch.Stream | None, place: OfBlock) -> None:
        self._device, self._stream, self._place = tensor.device, stream, place
        self._fetched: Tensor | None = None
        self._leaves: Tensor | None = None
        """The tensor itself, while it may still be copied to the CPU."""
        self._was_taken = False
        self._stored: Tensor | HostCopy
        if isinstance(tensor, FakeTensor):
            # If all blocks offload, the peak is in backward. A tensor that is held into another block would then only
            # keep the tracer from leaving blocks out.
            if place.inputs.of_some and are_copies_traced():
                self._leaves = tensor.detach()
            self._stored = tensor.detach().to(_HOST)
            return
        with torch.no_grad():
            if stream is None:
                # An alias at version 0.
                self._stored = torch.empty_like(tensor.detach(), device="cpu").copy_(tensor).data
                return
            self._leaves, self._stored = tensor.detach(), HostCopy(tensor)
            self._copy(stream, self._stored.fill, tensor)

    @property
    def is_held(self) -> bool:
        """Whether the tensor itself is kept, because its copy to the CPU may still run."""
        return self._leaves is not None

    def release(self) -> None:
        """Free the tensor that is copied to the CPU: what reuses its memory runs after the copy."""
        if self.is_held:
            self._computes_after_the_copy()
            self._leaves = None

    def fetch(self) -> None:
        """Begin to copy the tensor back, if backward has yet to take it."""
        if not self._was_taken:
            self._fetch()

    def _fetch(self) -> None:
        if self._fetched is not None:
            return
        if isinstance(self._stored, FakeTensor):
            self._fetched = torch.empty_like(self._stored, device=self._device)
        elif isinstance(self._stored, HostCopy) and self._stream is not None:
            with torch.no_grad():
                self._fetched = self._stored.empty_on(self._device)
                self._copy(self._stream, self._stored.copy_to, self._fetched)

    def _copy(self, stream: torch.Stream, copy: Callable[[Tensor], None], tensor: Tensor) -> None:
        # Behind the compute stream: it may still write `tensor`, or read a tensor whose memory `tensor` has now.
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        with stream:
            copy(tensor)
        self._copied = stream.record_event()

    def take(self) -> Tensor:
        """The tensor on its device, for work on the current stream."""
        if not isinstance(self._stored, (FakeTensor, HostCopy)):
            check_version(self._stored, 0)  # a block that changes its input in place cannot run again a second time
            return self._stored
        self._place.inputs.release()
        self._fetch()
        tensor, self._fetched, self._was_taken = self._fetched, None, True
        assert tensor is not None
        self._computes_after_the_copy()
        self._place.fetch_around()
        return tensor

    def _computes_after_the_copy(self) -> None:
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._copied)

    def __del__(self) -> None:
        if self._fetched is not None:  # its copy may still run, and nobody took it
            self._computes_after_the_copy()


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
