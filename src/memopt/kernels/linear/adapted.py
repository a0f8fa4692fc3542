"""A frozen linear and its low-rank adapter as one function.

    forward     y = x W^T + b + s (x A^T) B^T
    backward    dt = s dy,   dB = dt^T h,   dh = dt B,   dA = dh^T x,   dx = dh A + dy W         h = x A^T

Saved are the parameters themselves, h, and x or what x is recomputed from (`memopt.recompute_specs`); no copy of any in
another dtype. Every step is computed and rounded as the three linears do it on their own, autocast's casts and
PEFT's included, so value and gradients are theirs to the bit. Source: LoRA, arXiv 2106.09685.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt.kernels.base.autograd import DirectFunction, autocast_as, autocast_dtype, refuse_double_backward
from memopt.kernels.linear.function import is_plain, weight_gradient
from memopt.recompute_specs import RecomputeSpec, is_under_foreign_hooks, spec_of
from memopt.torch_compat import is_transformed


def adapted_linear(
    x: object, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float
) -> Tensor | None:
    """``F.linear(x, weight, bias) + F.linear(F.linear(x.to(a.dtype), a), b) * scaling`` in the dtype of the first term.

    Args:
        x: (..., in), floating point.
        weight, bias: (out, in) and (out,) or None.
        a, b: (r, in) and (out, r).

    Returns:
        y: (..., out); None where the linears have to run on their own: where weight or bias is trained, where types or
        dtypes are not those of a plain adapter, and under foreign saved-tensor hooks (activation checkpointing).
    """
    if not isinstance(x, Tensor) or not is_plain(x) or not x.is_floating_point() or is_transformed(x):
        return None
    if not (is_plain(weight) and is_plain(a) and is_plain(b)) or a.dtype is not b.dtype:
        return None
    if weight.requires_grad or not (b.requires_grad or a.requires_grad):
        return None
    if bias is not None and (bias.requires_grad or bias.dtype is not weight.dtype):
        return None
    dtype = autocast_dtype(x)
    of_adapter = dtype or a.dtype
    if dtype is None:
        if x.dtype is not weight.dtype:
            return None
        dtype = x.dtype
    elif x.dtype not in (torch.float32, dtype) or a.dtype not in (torch.float32, dtype):
        return None  # autocast leaves fp64 as it is, and two casts may round twice
    spec = spec_of(x)
    given = x
    if spec is None:
        # A scope copies a small view out of its storage only where no function saves it.
        if is_under_foreign_hooks() or x.is_leaf or x.untyped_storage().nbytes() != x.nbytes:
            return None
        if of_adapter.itemsize < x.dtype.itemsize:
            x, given = x.to(dtype), x.to(of_adapter)  # in the graph, so that a scope can follow it; in this order
    elif is_under_foreign_hooks():
        return None
    y: Tensor = AdaptedLinearFunction.apply(given, x, weight, bias, a, b, scaling, (dtype, of_adapter), spec)
    return y


class AdaptedLinearFunction(DirectFunction):
    """Its input is two of its arguments: autograd adds up their gradients, in the order in which two linears do."""

    @staticmethod
    def forward(
        ctx: Any,
        given: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scaling: float,
        dtypes: tuple[torch.dtype, torch.dtype],
        spec: RecomputeSpec | None,
    ) -> Tensor:
        """`given` is `x`, perhaps cast, for the adapter; `dtypes` are those of both terms."""
        dtype, of_adapter = dtypes
        needs_x = a.requires_grad
        ctx.scaling, ctx.shape, ctx.of_adapter, ctx.recompute = scaling, x.shape, of_adapter, None
        saved: Any = (given if needs_x else None,)
        if needs_x and spec is not None:
            ctx.recompute, ctx.recomputed, saved = spec.function, spec.recomputed, spec.take()
        read = given.to(of_adapter)
        h = F.linear(read, a.to(of_adapter))
        ctx.save_for_backward(weight if ctx.needs_input_grad[1] else None, a, b, h if b.requires_grad else None, *saved)
        y = F.linear(
            read if dtype is of_adapter else x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        )
        added = F.linear(h, b.to(of_adapter))
        return (y + (added if scaling == 1 else added * scaling)).to(dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        weight, a, b, h, *saved = ctx.saved_tensors
        needs_given, needs_x, _, _, needs_a, needs_b, *_ = ctx.needs_input_grad
        of_adapter = ctx.of_adapter
        given = dx = da = db = None
        with autocast_as(None, dy):
            rows = dy.reshape(-1, dy.size(-1))
            added = rows.to(of_adapter)
            if ctx.scaling != 1:
                added = added * ctx.scaling
            if needs_b:
                db = weight_gradient(added, h.view(-1, h.size(-1)), b)
            if needs_a or needs_given:
                dh = added.mm(b.to(of_adapter))
                del added
                if needs_a:
                    x = _rows(ctx, saved, of_adapter)
                    da = weight_gradient(dh, x, a)
                if needs_given:
                    given = dh.mm(a.to(of_adapter)).view(ctx.shape)
            if needs_x:
                dx = rows.mm(weight.to(dy.dtype)).view(ctx.shape)
        return given, dx, None, None, da, db, None, None, None


def _rows(ctx: Any, saved: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """x as a matrix in `dtype`."""
    if ctx.recompute is None:
        (x,) = saved
    else:
        x = ctx.recomputed.rows(ctx.recompute, saved, dtype)
    return x.reshape(-1, x.size(-1)).to(dtype)
