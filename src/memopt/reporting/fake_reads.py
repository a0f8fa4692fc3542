"""The values that a forward reads in a trace on fake tensors."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from memopt.torch_compat import FakeTensor, TorchDispatchMode, tree_leaves, unset_fake_temporarily


class FakeReads(TorchDispatchMode):
    """Lets a forward read values under a `FakeTensorMode` that is entered before.

    Results of real tensors alone (token ids, sizes of images) stay real, and so do integers that are created from no
    tensor (positions). Reading a value that a fake tensor lacks ("as many features as placeholders?") gives True or 1.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        fakes = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        if func is torch.ops.aten._local_scalar_dense.default and fakes and fakes[0].constant is None:
            return True if fakes[0].dtype == torch.bool else 1
        real = not fakes if tensors else _counts(func, args, kwargs or {})
        with unset_fake_temporarily() if real else contextlib.nullcontext():
            return func(*args, **(kwargs or {}))


def _counts(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a function of no tensors creates integers."""
    dtype = kwargs.get("dtype")
    if dtype is None:
        return func.overloadpacket is torch.ops.aten.arange and all(isinstance(leaf, int) for leaf in args)
    return not (dtype.is_floating_point or dtype.is_complex)
