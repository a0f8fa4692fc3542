"""Memory that nobody has written is NaN while a test runs, and a large negative number where there is no NaN.

A kernel or a reference that reads an element of `torch.empty` before it writes it then gives a result that no
comparison accepts, instead of one that is right as long as the memory happens to hold zeros. The functions are replaced
in Python: allocations inside PyTorch's own operators are not seen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._device
from torch import Tensor
from torch._subclasses import FakeTensor

_FUNCTIONS = ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty"))

#: Elements of the largest tensor that is filled: models of real size are allocated for their structure alone.
_LARGEST = 2**18


@contextmanager
def poisoned() -> Iterator[None]:
    """`torch.empty` and its kin are filled inside the `with`; compiled and traced code sees the stock functions."""
    # `torch.device` as a context looks its functions up once, by name: it has to see the stock ones, or it would not
    # move what they allocate to meta.
    torch.utils._device._device_constructors()
    stock = [(owner, name, getattr(owner, name)) for owner, name in _FUNCTIONS]
    for owner, name, function in stock:
        setattr(owner, name, _filled(function))
    try:
        yield
    finally:
        for owner, name, function in stock:
            setattr(owner, name, function)


def _filled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def filled(*args: Any, **kwargs: Any) -> Tensor:
        tensor = function(*args, **kwargs)
        if (
            type(tensor) is Tensor
            and tensor.numel() <= _LARGEST
            and tensor.layout == torch.strided
            and not tensor.is_meta
            and not _is_traced(tensor)
        ):
            _fill(tensor)
        return tensor

    return filled


def _is_traced(tensor: Tensor) -> bool:
    return torch.compiler.is_compiling() or isinstance(tensor, FakeTensor)


def _fill(tensor: Tensor) -> None:
    # `data` has a version counter of its own: the tensor is as fresh as an allocation.
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.data.fill_(torch.nan)
    elif tensor.dtype != torch.bool:
        tensor.data.fill_(torch.iinfo(tensor.dtype).min // 2 or 77)
