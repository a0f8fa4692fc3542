"""Whether a tensor is saved by an operation of PyTorch itself or by a `torch.autograd.Function`."""

from __future__ import annotations

from types import CodeType, FrameType

import torch

from memopt.kernels.base.autograd import DIRECT_APPLY

#: The code that is running while a function of `torch.autograd.Function` saves its tensors; None where it is not known.
APPLY: CodeType | None = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)


def may_be_a_function(frame: FrameType | None) -> bool:
    """Whether a hook that was called from `frame` may have been given what a `torch.autograd.Function` saves."""
    return APPLY is None or is_function(frame)


def may_write_into_saved(frame: FrameType | None) -> bool:
    """Whether it may have been given what a function of somebody else's saves, which may write into its own clone."""
    return APPLY is None or frame is None or frame.f_code is APPLY


def is_function(frame: FrameType | None) -> bool:
    """Whether `frame` applies a `torch.autograd.Function`."""
    return frame is not None and (frame.f_code is APPLY or frame.f_code is DIRECT_APPLY)
