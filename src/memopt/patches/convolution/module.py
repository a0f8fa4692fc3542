"""Convolutions that free a recomputed input before they compute its gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from memopt.kernels.base.autograd import autocast_dtype
from memopt.kernels.convolution.function import Settings, convolution
from memopt.kernels.linear.function import is_plain
from memopt.patches.scope import ScopeRewrite, run_scoped
from memopt.patches.swap import original_class, steps_aside, swap_forward
from memopt.saved.scope import recomputes

#: Elements of the smallest input whose memory is worth the host time of memopt's autograd function.
LARGE = 2**18
_CLASSES = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def patch_convolution(module: nn.Module, scope: ScopeRewrite | None = None) -> None:
    """Let `module`, a convolution by :func:`is_convolution`, run as memopt's function if its input is recomputed.
    `scope`: the scope in which `module` runs; None if it has none of its own."""
    swap_forward(module, _forward, scope)


def is_convolution(module: nn.Module) -> bool:
    """Whether `module` runs PyTorch's own forward of a convolution, with zero padding of fixed size."""
    return "forward" not in vars(module) and "parametrizations" not in module._modules and _has_own_forward(module)


def _has_own_forward(module: nn.Module) -> bool:
    """Whether the class of `module` runs PyTorch's convolution, with zero padding of fixed size."""
    known = next((each for each in _CLASSES if isinstance(module, each)), None)
    if known is None or "_conv_forward" in vars(module):
        return False
    own = original_class(module)
    is_own = own.forward is known.forward and own._conv_forward is known._conv_forward  # type: ignore[attr-defined]
    return is_own and module.padding_mode == "zeros" and not isinstance(module.padding, str)


def _forward(
    stock: Callable[..., Tensor], scope: ScopeRewrite | None, module: nn.Module, *args: Any, **kwargs: Any
) -> Tensor:
    output: Tensor = run_scoped(functools.partial(_run, stock), scope, module, *args, **kwargs)
    return output


def _run(stock: Callable[..., Tensor], module: Any, *args: Any, **kwargs: Any) -> Tensor:
    x: Any = args[0] if args else None
    if len(args) != 1 or kwargs or not isinstance(x, Tensor) or not x.requires_grad or x.numel() < LARGE:
        return stock(module, *args, **kwargs)
    # A weight that is computed anew at each read (a parametrisation, which may draw numbers) is read once.
    if not _has_own_forward(module) or "parametrizations" in module._modules:  # any more
        return stock(module, *args)
    weight, bias = module.weight, module.bias
    dtype = autocast_dtype(x) or x.dtype
    # If `x` were not contiguous, its gradient would have another layout than PyTorch's gradient.
    known = x.dim() == weight.dim() and x.is_contiguous() and is_plain(weight) and (x.is_cuda or x.is_cpu)
    if not known or steps_aside() or not weight.requires_grad:
        return stock(module, *args)
    if x.dtype is not dtype:
        x = x.to(dtype)
    if not recomputes(x):
        return stock(module, *args)
    settings = Settings(module.stride, module.padding, module.dilation, module.groups)
    return convolution(x, weight.to(dtype), None if bias is None else bias.to(dtype), settings)
