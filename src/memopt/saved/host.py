"""Copies of tensors in page-locked CPU memory, in pieces that lose little of it.

PyTorch's allocator of page-locked memory rounds every block up to a power of two
(`ATen/core/CachingHostAllocator.h`), which takes up to twice a tensor's bytes. Pieces whose sizes are powers of two
already lose nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

#: A tensor is rounded up to a multiple of the largest power of two below it, over this: it has at most 8 pieces.
_PARTS = 128
#: The operating system locks whole pages.
_PAGE = 4096
_is_traced_for_device = False


def host_bytes(nbytes: int) -> int:
    """Page-locked bytes that a copy of a tensor of `nbytes` takes: less than 1/128 more, or less than a page."""
    unit = max(_PAGE, (1 << nbytes.bit_length()) // 2 // _PARTS)
    return -(-nbytes // unit) * unit


@contextlib.contextmanager
def copies_traced() -> Iterator[None]:
    """Inside, fake tensors are held for their copies to the CPU, as a device holds tensors."""
    global _is_traced_for_device
    before, _is_traced_for_device = _is_traced_for_device, True
    try:
        yield
    finally:
        _is_traced_for_device = before


def are_copies_traced() -> bool:
    """Whether this runs in :func:`copies_traced`."""
    return _is_traced_for_device


def host_pieces(nbytes: int) -> list[int]:
    """The sizes of the pieces, powers of two in falling order; their sum is `host_bytes`."""
    total = host_bytes(nbytes)
    return [1 << power for power in reversed(range(total.bit_length())) if total >> power & 1]


class HostCopy:
    """Page-locked memory for a copy of `tensor`, which must be dense, in any order of strides. Copies run on the
    current stream, and the host does not wait for them."""

    __slots__ = ("_layout", "_pieces")

    def __init__(self, tensor: Tensor) -> None:
        self._layout = torch.empty_like(tensor, device="meta")
        self._pieces = [_page_locked(size) for size in host_pieces(tensor.numel() * tensor.element_size())]

    def fill(self, tensor: Tensor) -> None:
        """Copy `tensor` into this memory."""
        for piece, part in self._parts(tensor):
            piece.copy_(part, non_blocking=True)

    def copy_to(self, tensor: Tensor) -> None:
        """Copy this memory into `tensor`, which is from `empty_on`."""
        for piece, part in self._parts(tensor):
            part.copy_(piece, non_blocking=True)

    def empty_on(self, device: torch.device) -> Tensor:
        """A tensor of the same shape, strides and dtype on `device`, without values."""
        return torch.empty_like(self._layout, device=device)

    def _parts(self, tensor: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Every piece with its part of the bytes of `tensor`."""
        flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        parts = []
        for piece in self._pieces:
            part, flat = flat[: len(piece)], flat[len(piece) :]
            parts.append((piece[: len(part)], part))
        return parts


def _page_locked(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
