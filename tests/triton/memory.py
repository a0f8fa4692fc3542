"""Memory that shows what a kernel must not do: borders around tensors, and tensors too large to be filled.

The interpreter does not notice an access out of bounds, and a GPU seldom does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

#: Fills borders and fresh outputs. It is NaN in every float format, so what is read or left there shows in a result.
SENTINEL = 0xFF
#: Bytes on each side; a multiple of every alignment that Triton looks for, and longer than a row of the usual tests.
BORDER = 16384

_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}


class RedZones(TorchDispatchMode):
    """Puts a border around every tensor that torch.empty and its kin give inside the `with`; :meth:`check` at its end.

    Fresh tensors hold NaN (integers -1) until they are written, so an element that a kernel forgets is seen as well.
    Allocations inside a custom operator are not seen: call the launchers themselves.
    """

    def __init__(self) -> None:
        super().__init__()
        self._outputs: list[tuple[Tensor, int, int]] = []
        self._inputs: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func not in _ALLOCATIONS or made.is_meta:
            return made
        guarded, storage = _inside_borders(made)
        self._outputs.append((storage, BORDER, storage.numel() - BORDER))
        return guarded

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        super().__exit__(exc_type, exc_value, traceback)
        if exc_type is None:
            self.check()

    def guard(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor` with its strides, inside borders; nothing of it may be written, gaps included."""
        guarded, storage = _inside_borders(tensor)
        if tensor.numel():
            # An expanded tensor holds an element several times; each place is written once.
            _first_places(guarded).copy_(_first_places(tensor))
        self._inputs.append((storage, storage.clone()))
        return guarded

    def check(self) -> None:
        """Fail the test if anything outside of an output, or anything of a guarded input, was written."""
        for storage, begin, end in self._outputs:
            assert (storage[:begin] == SENTINEL).all(), "written in front of an output"
            assert (storage[end:] == SENTINEL).all(), "written past the end of an output"
        for storage, before in self._inputs:
            assert torch.equal(storage, before), "an input was written"


def _inside_borders(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """An uninitialized tensor with the strides of `tensor`, and the storage around it (as bytes) full of sentinels."""
    nbytes = _span(tensor.shape, tensor.stride()) * tensor.element_size()
    storage = torch.full((BORDER + nbytes + BORDER,), SENTINEL, dtype=torch.uint8, device=tensor.device)
    elements = storage.view(tensor.dtype)
    return elements.as_strided(tensor.shape, tensor.stride(), BORDER // tensor.element_size()), storage


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last of a strided tensor."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _first_places(tensor: Tensor) -> Tensor:
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def lazily_huge(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: str) -> Tensor:
    """An uninitialized tensor whose last element may lie far beyond 2**31 elements of storage.

    On the CPU only the pages that are written take memory. Skips the test where the device cannot hold it.
    """
    elements = _span(shape, strides)
    if device == "cuda" and torch.cuda.mem_get_info()[0] < elements * dtype.itemsize * 1.1:
        pytest.skip(f"needs {elements * dtype.itemsize / 2**30:.0f} GiB of free GPU memory")
    try:
        storage = torch.empty(elements, dtype=dtype, device=device)
    except RuntimeError as error:
        pytest.skip(f"the machine does not give {elements * dtype.itemsize / 2**30:.0f} GiB of address space: {error}")
    return storage.as_strided(tuple(shape), tuple(strides))
