"""fp64 throughout: a dispatch mode that replaces every requested 16- or 32-bit float dtype by fp64.

Norms, routers and rotary embeddings upcast "to float32" inside; in an fp64 model that rounds to 1e-7, which is too
coarse for a proof to 1e-10.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from memopt.torch_compat import TorchDispatchMode

_WIDENED = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}

_PRODUCTS = frozenset({torch.ops.aten.mm, torch.ops.aten.bmm})


def widen(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an aten op with every narrow floating dtype among them replaced by its 64-bit one."""
    if any(isinstance(value, torch.dtype) and value in _WIDENED for value in args):
        args = tuple(_WIDENED.get(value, value) if isinstance(value, torch.dtype) else value for value in args)
    dtype = kwargs.get("dtype")
    if isinstance(dtype, torch.dtype) and dtype in _WIDENED:
        kwargs = {**kwargs, "dtype": _WIDENED[dtype]}
    return args, kwargs


class Float64Mode(TorchDispatchMode):
    """Runs every op with its dtype arguments changed by `widen`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = widen(args, kwargs or {})
        if func.overloadpacket in _PRODUCTS and len({each.dtype for each in args}) > 1:
            # A cast of fp32 to fp32 runs no op and stays fp32; older rotary embeddings multiply it by a widened tensor.
            args = tuple(each.double() for each in args)
        return func(*args, **kwargs)


@contextlib.contextmanager
def precise(dtype: torch.dtype) -> Iterator[None]:
    """If `dtype` is fp64, compute everything inside in fp64, upcasts "to float32" included; else change nothing."""
    if dtype != torch.float64:
        yield
        return
    with default_dtype(dtype), Float64Mode():
        yield


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make `dtype` torch's default dtype inside."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
