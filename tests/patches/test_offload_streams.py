"""Offloaded tensors in the order of streams: the host is always ahead, and two blocks at most are on the device."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from memopt.patches.checkpointing.offload import OfBlock, OffloadedInputs, _Waiting
from memopt.saved import host

BLOCKS = 6


class Event:
    """The place in a stream behind what was issued so far."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.behind = stream, len(stream.issued)


class Stream:
    """A stream that runs nothing: a list of what was issued, in which an event stands for a wait."""

    def __init__(self) -> None:
        self.issued: list[str | Event] = []

    def record_event(self) -> Event:
        return Event(self)

    def wait_event(self, event: Event) -> None:
        self.issued.append(event)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def __enter__(self) -> None:
        inside.append(self)

    def __exit__(self, *error: object) -> None:
        inside.pop()

    def done_before(self, behind: int) -> set[str]:
        """All work that has ended on any stream when this one comes to its place `behind`."""
        found: set[str] = set()
        for each in self.issued[:behind]:
            found |= {each} if isinstance(each, str) else each.stream.done_before(each.behind)
        return found


inside: list[Stream] = []


class Device:
    """The CPU as a device with two streams."""

    def __init__(self) -> None:
        self.computes, self.copies = Stream(), Stream()
        self.recorded = 0

    def before(self, name: str) -> set[str]:
        """What has ended when `name` starts."""
        stream = self.computes if name in self.computes.issued else self.copies
        return stream.done_before(stream.issued.index(name))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    found = Device()
    monkeypatch.setattr(OffloadedInputs, "stream", lambda self, device: found.copies)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: found.computes)
    monkeypatch.setattr(host, "_page_locked", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))

    def record_stream(self: Tensor, stream: Any) -> None:
        found.recorded += 1

    monkeypatch.setattr(Tensor, "record_stream", record_stream)
    for name, to in (("fill", "out"), ("copy_to", "back")):
        monkeypatch.setattr(host.HostCopy, name, logged(getattr(host.HostCopy, name), to))
    yield found
    assert not inside


def logged(copy: Any, to: str) -> Any:
    def run(self: host.HostCopy, tensor: Tensor) -> None:
        copy(self, tensor)
        inside[-1].issued.append(f"{to} {int(tensor.flatten()[0])}")

    return run


def forward(device: Device) -> tuple[list[OfBlock], list[_Waiting], list[int]]:
    """Blocks that keep a tensor each; also the number of originals that are alive behind each block."""
    inputs, places, waiting, alive = OffloadedInputs(), [], [], []
    originals: list[weakref.ref[Any]] = []
    for block in range(BLOCKS):
        tensor = torch.full((10,), float(block))
        originals.append(weakref.ref(tensor.untyped_storage()))
        places.append(inputs.of_a_block())
        waiting.append(places[-1].wait(tensor))
        del tensor
        gc.collect()
        device.computes.issued.append(f"forward {block}")
        alive.append(sum(each() is not None for each in originals))
    return places, waiting, alive


def test_in_forward_two_tensors_at_most_are_held_and_memory_is_reused_behind_its_copy(device: Device) -> None:
    _, _, alive = forward(device)
    assert max(alive) == 2
    for block in range(2, BLOCKS):
        assert f"out {block - 2}" in device.before(f"forward {block}")


def test_in_forward_no_copy_is_waited_for_too_early(device: Device) -> None:
    forward(device)
    for block in range(1, BLOCKS):
        assert f"out {block - 1}" not in device.before(f"forward {block}")


def test_in_backward_one_block_is_fetched_ahead_and_no_more(device: Device) -> None:
    _, waiting, _ = forward(device)
    for block in reversed(range(BLOCKS)):
        assert waiting[block].take().equal(torch.full((10,), float(block)))
        device.computes.issued.append(f"backward {block}")
    for block in range(BLOCKS):
        ran = device.before(f"backward {block}")
        assert f"back {block}" in ran
        assert f"back {block - 1}" not in ran  # it is copied while the block runs
        if block + 2 < BLOCKS:
            assert f"backward {block + 2}" in device.before(f"back {block}")


def test_backward_frees_the_last_tensors_of_forward_behind_their_copies(device: Device) -> None:
    _, waiting, _ = forward(device)
    waiting[-1].take()
    assert all(each._leaves is None for each in waiting)
    device.computes.issued.append("backward")
    assert f"out {BLOCKS - 1}" in device.before("backward")


def test_memory_of_a_tensor_that_was_fetched_and_not_taken_is_reused_behind_its_copy(device: Device) -> None:
    _, waiting, _ = forward(device)
    waiting[-1].take()
    device.computes.issued.append("reads other memory")
    del waiting
    gc.collect()
    device.computes.issued.append("may reuse it")
    assert f"back {BLOCKS - 2}" not in device.before("reads other memory")
    assert f"back {BLOCKS - 2}" in device.before("may reuse it")


def test_a_step_on_streams_has_stocks_gradient_and_leaves_the_allocator_no_stream_to_look_at(device: Device) -> None:
    inputs, x = OffloadedInputs(), torch.randn(30, 40, requires_grad=True)
    hidden, expected = x, x
    for _ in range(BLOCKS):
        expected = expected.sin()
        with inputs.of_a_block().hooks():
            hidden = checkpoint(torch.sin, hidden, use_reentrant=False)
    (right,) = torch.autograd.grad(expected.sum(), x)
    (found,) = torch.autograd.grad(hidden.sum(), x)
    assert torch.equal(found, right)
    assert device.recorded == 0
