"""Which elements are the largest, of tensors without values: each is as often as the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

#: Operations that return which elements are the largest -> position of the dimension in their arguments, and default.
_PICKING = {
    torch.ops.aten.topk.default: (2, -1),
    torch.ops.aten.argmax.default: (1, None),
    torch.ops.aten.max.dim: (1, None),
}


def picks(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an aten overload returns, along a dimension, indices that values decide."""
    return function in _PICKING and args[0].dim() > 0 and _dim(function, args, kwargs) is not None


def picked_evenly(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
    """`output` of an operation that `picks`, with indices on the CPU: a row goes on where the row before it ended."""
    dim, size = _dim(function, args, kwargs), args[0].shape
    assert dim is not None, "picks() is false then"
    like = output if isinstance(output, Tensor) else output[1]
    shape = list(like.shape if like.dim() == len(size) else like.unsqueeze(dim).shape)
    shape.append(shape.pop(dim))
    places = torch.arange(like.numel()) % size[dim]
    indices = places.reshape(shape).movedim(-1, dim).reshape(like.shape).contiguous()
    return indices if like is output else (output[0], indices)


def _dim(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    place, default = _PICKING[function]
    return args[place] if len(args) > place else kwargs.get("dim", default)
