"""Forwards on meta tensors that read values all the same. What values they get is decided here, nothing else."""

from __future__ import annotations

from typing import Any

import torch

from memopt.torch_compat import TorchDispatchMode, tree_leaves, tree_map
from memopt.walk.aten.meta_shapes import MetaShapes


class MetaReads(TorchDispatchMode):
    """Lets a forward on meta tensors read values and mix them with tensors that have some.

    Branches on values that meta tensors lack ("is all of the mask set?") get a plausible yes, or 1. Where numbers on
    the CPU meet meta tensors in one operation, that operation goes on without their values.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shapes = MetaShapes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return True if args[0].dtype == torch.bool else 1
        try:
            return self._shapes.call(func, args, kwargs or {})
        except RuntimeError:
            devices = {leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
            if devices != {"cpu", "meta"}:
                raise
            args, kwargs = tree_map(_to_meta, (args, kwargs))
            return func(*args, **(kwargs or {}))


def _to_meta(leaf: Any) -> Any:
    return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf
