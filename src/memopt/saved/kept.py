"""Tensors that are saved as they are, by autograd or by the outer hook; and the tests whether an operation of PyTorch
or a `torch.autograd.Function` saves them."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn

from memopt.kernels.base.autograd import DIRECT_APPLY
from memopt.recompute.versions import check_version
from memopt.saved.applied import applied, may_apply
from memopt.saved.handles import remaking


class Kept:
    """A tensor kept as it is. Hooks switch autograd's own version check off, so this class makes it."""

    __slots__ = ("__weakref__", "_version", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.keep(alias_of(tensor))

    def keep(self, tensor: Tensor) -> None:
        self.tensor, self._version = tensor, tensor._version

    def instead(self, tensor: Tensor) -> Kept:
        return Kept(tensor)

    def unpack(self) -> Tensor:
        check_version(self.tensor, self._version)
        return self.tensor


class ShapeOnly:
    """The shape of a saved tensor, for an operation that reads no values in backward: they would be NaN."""

    __slots__ = ("_device", "_dtype", "_shape")

    def __init__(self, tensor: Tensor) -> None:
        self._shape, self._dtype, self._device = tensor.shape, tensor.dtype, tensor.device

    def unpack(self) -> Tensor:
        return torch.full((), torch.nan, dtype=self._dtype, device=self._device).expand(self._shape)


def alias_of(tensor: Tensor) -> Tensor:
    """The tensor to hold for a saved tensor: a detached alias, or a parameter itself.

    A non-leaf would own the node that owns it, a reference cycle. Aliases also make the storage's reference count show
    whether anything else refers to it. A parameter is held itself, because sharded training may exchange its data
    between forward and backward.
    """
    is_parameter = isinstance(tensor, nn.Parameter) or (tensor.is_leaf and tensor.requires_grad)
    return tensor if is_parameter else tensor.detach()


class Forwarded:
    """A tensor that the outer hook keeps.

    Checkpointing's hook unpacks each tensor only once per backward. If a handle unpacks a saved tensor of its node
    first, this object holds the tensor until the node itself unpacks it.
    """

    __slots__ = ("_early", "_packed", "memopt_unpack")

    def __init__(self, packed: Any, unpack: Callable[[Any], Tensor] | None) -> None:
        self._packed, self.memopt_unpack = packed, unpack
        self._early: Tensor | None = None

    def unpack(self) -> Tensor:
        tensor = self._early
        if tensor is None:
            assert self.memopt_unpack is not None
            tensor = self.memopt_unpack(self._packed)
        self._early = tensor if remaking.depth else None
        return tensor

    def beside(self, tensor: Tensor) -> Any:
        """The object that holds `tensor` for the node that saved this one: an observer's, else `tensor` itself."""
        seen = getattr(self._packed, "beside", None)
        return tensor if seen is None else seen(tensor)


#: The code that runs while a `torch.autograd.Function` saves its tensors; None if it is not Python.
APPLY: CodeType | None = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)


def may_be_a_function(frame: FrameType | None) -> bool:
    """Whether a hook that was called from `frame` may have got a tensor that a `torch.autograd.Function` saves."""
    return APPLY is None if frame is None else _is_apply(frame) or (APPLY is None and may_apply(frame))


def may_write_into_saved(frame: FrameType | None) -> bool:
    """Whether the hook may have got a tensor that a foreign autograd function saves, which may write into its copy."""
    if frame is None or APPLY is not None:
        return frame is None or frame.f_code is APPLY
    return frame.f_code is not DIRECT_APPLY and may_apply(frame)


def function_of(frame: FrameType) -> type | None:
    """The `torch.autograd.Function` that `frame` applies, if it is known."""
    if _is_apply(frame):
        return cast("type", frame.f_locals["cls"])
    return applied(frame) if APPLY is None else None


def _is_apply(frame: FrameType) -> bool:
    return frame.f_code is APPLY or frame.f_code is DIRECT_APPLY
