"""Where an operator runs: its Triton kernels, or plain PyTorch.

The Triton kernels are in the ``*_triton.py`` file beside each operator, which is imported only if
:func:`runs_triton` is true.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from memopt.torch_compat import FakeTensor, is_legacy_batched, is_transformed

#: Triton's interpreter runs the kernels on CPU tensors; it is a tool of the tests.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_is_there: Callable[[Tensor], bool] = attrgetter("is_cpu" if INTERPRETED else "is_cuda")
_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
#: Fake and sharded tensors have no memory that a kernel can read.
_PLAIN_TYPES: frozenset[type] = frozenset({Tensor, nn.Parameter})


def runs_triton(*tensors: Tensor | None) -> bool:
    """Whether the Triton kernels run on these tensors, and not the operator's PyTorch reference.

    They run on fp32, bf16 and fp16 on a CUDA or ROCm device. ``MEMOPT_TRITON=0`` in the environment switches them off.
    """
    if not _triton_is_there():
        return False
    for tensor in tensors:
        if tensor is not None and (
            type(tensor) not in _PLAIN_TYPES
            or not _is_there(tensor)
            or tensor.dtype not in _DTYPES
            or is_transformed(tensor)
            or is_legacy_batched(tensor)
        ):
            return False
    return True


def imported_once(module: str) -> Callable[[], Any]:
    """A function that returns `module`, a module of Triton kernels, and imports it at its first call."""
    return functools.cache(functools.partial(importlib.import_module, module))


@functools.cache
def _triton_is_there() -> bool:
    return os.environ.get("MEMOPT_TRITON", "1") != "0" and importlib.util.find_spec("triton") is not None


@contextlib.contextmanager
def launches_emulated() -> Iterator[None]:
    """Inside, fake CPU tensors count as CUDA tensors: operators run the launchers of their Triton kernels, which
    allocate but launch no kernel. Does nothing without Triton, or in its interpreter."""
    global _is_there, _PLAIN_TYPES
    if INTERPRETED or not _triton_is_there():
        yield
        return
    from triton.runtime import JITFunction

    before = _is_there, _PLAIN_TYPES, JITFunction.__getitem__
    _is_there, _PLAIN_TYPES = attrgetter("is_cpu"), frozenset({FakeTensor})
    JITFunction.__getitem__ = lambda kernel, grid: _launch_nothing
    try:
        yield
    finally:
        _is_there, _PLAIN_TYPES, JITFunction.__getitem__ = before


def _launch_nothing(*args: Any, **kwargs: Any) -> None:
    pass


@contextlib.contextmanager
def pieces_computed() -> Iterator[None]:
    """Inside, references run all their pieces on fake tensors too, e.g. to find the peak memory on a CPU."""
    global _skips_pieces
    before, _skips_pieces = _skips_pieces, False
    try:
        yield
    finally:
        _skips_pieces = before


_skips_pieces = True


def skips_pieces(tensor: Tensor) -> bool:
    """Whether a reference may skip its work piece by piece: a fake tensor has no values to compute.

    Then only the results are allocated, as with Triton kernels.
    """
    return _skips_pieces and isinstance(tensor, FakeTensor)
