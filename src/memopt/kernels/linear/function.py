"""A linear whose input is made again in backward, together with the gradients of what it is made from.

    forward     y = h W^T + b            h = f(z), or f(gate) * up, ...
    backward    dh = dy W
                h again and dz (or dgate and dup), from one pass over dh and z (or gate and up)
                dW = dy^T h,   db = sum over rows of dy

A stock linear asks for h before dh is there, so making h again costs a pass of its own. Here both come from one pass,
which reads each input once: for f(z) it moves 4 instead of 5 tensors of the size of h, for f(gate) * up 6 instead of 8.

An operator that can do so calls :func:`offer` with its output; :func:`linear` takes the offer up where it finds one.
The offer is not part of h: it is lost where h is changed, viewed, copied or hooked, and then the stock linear runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from memopt.kernels.base.autograd import autocast_as, autocast_dtype, not_a_view, refuse_double_backward
from memopt.torch_compat import FakeTensor, tensor_hooks, top_saved_tensors_hooks

#: (dh, inputs) -> (gradient of each input, h)
Differentiate = Callable[[Tensor, tuple[Tensor, ...]], tuple[tuple[Tensor, ...], Tensor]]


@dataclass(frozen=True)
class _Offer:
    inputs: tuple[Tensor, ...]
    versions: tuple[int, ...]
    differentiate: Differentiate
    hooks: object
    """The saved-tensor hooks under which it was made."""


#: h -> its offer, for as long as h lives.
_offers = WeakTensorKeyDictionary()
#: Weights of other types bring their own idea of a linear.
_PLAIN_TYPES = frozenset({Tensor, nn.Parameter, FakeTensor})


def offer(h: Tensor, inputs: tuple[Tensor, ...], differentiate: Differentiate) -> None:
    """Say that `h` is made from `inputs`, which are kept anyway, and that `differentiate` makes it again with their
    gradients."""
    if h.requires_grad:
        _offers[h] = _Offer(inputs, _versions(inputs), differentiate, top_saved_tensors_hooks(False))


def withdraw(h: Tensor) -> None:
    """Take the offer for `h` back: somebody else may want h itself, with its place in the graph."""
    _offers.pop(h, None)


def takes_offer(h: object, weight: Tensor) -> bool:
    """Whether :func:`linear` would make `h` again.

    There is an offer for this very tensor, neither it nor what it is made from was changed or hooked since, the weight
    is trained, and no cast stands between the two. Under other saved-tensor hooks than the offer's (checkpointing of
    the linear alone) it is not taken: the second run would find none.
    """
    if not isinstance(h, Tensor) or torch.compiler.is_compiling() or not weight.requires_grad:
        return False
    found: _Offer | None = _offers.get(h)
    if found is None or h._version != 0 or tensor_hooks(h) or h.retains_grad:
        return False
    if not is_plain(weight) or h.dtype != (autocast_dtype(h) or weight.dtype):
        return False
    return found.versions == _versions(found.inputs) and found.hooks == top_saved_tensors_hooks(False)


def is_plain(weight: object) -> bool:
    """Whether `weight` is no tensor of another type."""
    return type(weight) in _PLAIN_TYPES


def linear(h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear(h, weight, bias)``, under autocast too, that does not keep `h` where it can be made again.

    Args:
        h: (..., in), floating point.
        weight: (out, in), in any layout. It is read behind the back of its module.
        bias: (out,) or None.

    Returns:
        y: (..., out).
    """
    if not takes_offer(h, weight):
        return F.linear(h, weight, bias)
    found: _Offer = _offers.pop(h)
    dtype = autocast_dtype(h)
    if dtype is not None:
        # Ordinary casts, as autocast makes them, so that the gradients reach the parameters in their own dtype.
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    y: Tensor = LinearFunction.apply(  # type: ignore[no-untyped-call]
        found.differentiate, h.detach(), weight, bias, *found.inputs
    )
    return y


class LinearFunction(torch.autograd.Function):
    """Keeps the weight and what its input is made from."""

    @staticmethod
    def forward(
        ctx: Any, differentiate: Differentiate, h: Tensor, weight: Tensor, bias: Tensor | None, *inputs: Tensor
    ) -> Tensor:
        ctx.differentiate, ctx.shape = differentiate, h.shape
        ctx.save_for_backward(weight, *inputs)
        with autocast_as(None, h):
            return not_a_view(F.linear(h, weight, bias))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        weight, *inputs = ctx.saved_tensors
        needs = ctx.needs_input_grad
        with autocast_as(None, dy):
            rows = dy.reshape(-1, dy.size(-1))
            gradients, h = ctx.differentiate((rows @ weight).view(ctx.shape), tuple(inputs))
            dweight = weight_gradient(rows, h.reshape(-1, h.size(-1)), weight) if needs[2] else None
            dbias = rows.sum(0) if needs[3] else None
        wanted = (gradient if need else None for gradient, need in zip(gradients, needs[4:], strict=True))
        return None, None, dweight, dbias, *wanted


def weight_gradient(dy: Tensor, h: Tensor, weight: Tensor) -> Tensor:
    """dy^T h in the layout of the weight, so that nothing has to be transposed before it is added up."""
    return dy.t() @ h if weight.stride(-1) == 1 else (h.t() @ dy).t()


def _versions(tensors: tuple[Tensor, ...]) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in tensors)
