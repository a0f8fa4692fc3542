"""Stochastic arithmetic: rounding at random shows how large the rounding error of a result can be (CESTAC: Vignes,
1993)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memopt.torch_compat import TorchDispatchMode, operator_schema, tree_map


class RandomRounding(TorchDispatchMode):
    """Inside, each result in `dtype` is changed by up to `scale` / 2 units in the last place and then rounded.

    It draws from torch's default generator. Views, and results that are or would become infinite, are not changed.
    """

    def __init__(self, dtype: torch.dtype, scale: float = 1.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dtype, self._scale = dtype, scale

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(each.alias_info is not None for each in operator_schema(func).returns):
            return result
        return tree_map(self._rounded, result)

    def _rounded(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dtype != self._dtype or leaf.is_meta:
            return leaf
        return rounded_at_random(leaf, self._scale)


def rounded_at_random(tensor: Tensor, scale: float = 1.0) -> Tensor:
    """`tensor`, with each element changed by up to `scale` / 2 units in the last place and then rounded."""
    off = torch.finfo(tensor.dtype).eps * scale * (torch.rand_like(tensor, dtype=torch.float64) - 0.5)
    rounded = (tensor.double() * (1 + off)).to(tensor.dtype)
    return torch.where(rounded.isfinite(), rounded, tensor)
