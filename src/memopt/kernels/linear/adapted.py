"""A frozen linear and its low-rank adapter as one function.

    forward     y = x W^T + b + s (x A^T) B^T
    backward    dt = s dy,   dB = dt^T h,   dh = dt B,   dA = dh^T x,   dx = dh A + dy W         h = x A^T

Saved are the parameters themselves, h, and x or what x is recomputed from (`memopt.recompute_specs`); no copy of any in
another dtype. Every step is computed and rounded as the three linears do it on their own, autocast's casts and
PEFT's included, so value and gradients are theirs to the bit; under autocast on a GPU dA and dB have one rounding less
(`weight_gradient`). Source: LoRA, arXiv 2106.09685.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt.kernels.base.autograd import DirectFunction, autocast_as, autocast_dtype, refuse_double_backward
from memopt.kernels.linear.function import input_gradient, is_computed_behind, is_plain, weight_gradient
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
        y: (..., out); None where the linears have to run on their own: where weight or bias is trained, and where
        types or dtypes are not those of a plain adapter.
    """
    if not isinstance(x, Tensor) or not (is_plain(x) and is_plain(weight) and is_plain(a) and is_plain(b)):
        return None
    if weight.requires_grad or not (a.requires_grad or b.requires_grad) or a.dtype is not b.dtype:
        return None
    if bias is not None and (bias.requires_grad or bias.dtype is not weight.dtype):
        return None
    if not x.is_floating_point() or x.layout is not torch.strided or x.is_nested or is_transformed(x):
        return None
    dtype = autocast_dtype(x)
    of_adapter = dtype or a.dtype
    if dtype is None:
        dtype = weight.dtype
        if x.dtype is not dtype:
            return None
    elif x.dtype not in (torch.float32, dtype) or a.dtype not in (torch.float32, dtype):
        return None  # autocast leaves fp64 as it is, and two casts may round twice
    spec, given = spec_of(x), x
    if spec is None:
        narrows = of_adapter.itemsize < x.dtype.itemsize
        # A scope copies a small view out of its storage only where no function saves it, and autocast casts a leaf once
        # for all its readers. Checkpointing has no scope, and must find the same where inputs of a region are leaves.
        is_left = x.untyped_storage().nbytes() != x.nbytes or (narrows and x.is_leaf and x.requires_grad)
        if is_left and not is_under_foreign_hooks():
            return None
        if narrows:
            x, given = x.to(dtype), x.to(of_adapter)  # in the graph, so that a scope can follow it; in this order
    behind: list[Tensor] | None = [] if is_computed_behind() else None
    y: Tensor = AdaptedLinearFunction.apply(given, x, weight, bias, a, b, scaling, (dtype, of_adapter), spec, behind)
    if behind is not None:
        with torch.no_grad():
            torch.add(_of_frozen(x, weight, bias, dtype), _of_adapter(behind[0], b, scaling), out=y.data)
    return y


def _of_frozen(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def _of_adapter(h: Tensor, b: Tensor, scaling: float) -> Tensor:
    y = F.linear(h, b.to(h.dtype))
    return y if scaling == 1 else y * scaling


class AdaptedLinearFunction(DirectFunction):
    """Its input is two of its arguments: autograd adds up their gradients, in the order in which two linears do."""

    __memopt_saves__ = "linear input"

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
        behind: list[Tensor] | None,
    ) -> Tensor:
        """`given` is `x`, perhaps cast, for the adapter; `dtypes` are those of both terms. `behind` is given h, and the
        result no values."""
        dtype, of_adapter = dtypes
        ctx.scaling, ctx.shape, ctx.of_adapter, ctx.recompute = scaling, x.shape, of_adapter, None
        saved: Sequence[Tensor | None] = (given,)
        if not a.requires_grad:
            saved = (None,)
        elif spec is not None:
            ctx.recompute, ctx.recomputed, saved = spec.function, spec.recomputed, spec.take()
        read = given.to(of_adapter)
        h = F.linear(read, a.to(of_adapter))
        ctx.save_for_backward(weight if ctx.needs_input_grad[1] else None, a, b, h if b.requires_grad else None, *saved)
        if behind is not None:
            behind.append(h)
            return h.new_empty(*x.shape[:-1], weight.size(0), dtype=dtype)
        y = _of_frozen(read if dtype is of_adapter else x, weight, bias, dtype)
        return (y + _of_adapter(h, b, scaling)).to(dtype)

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
                    given = input_gradient(dh, a, ctx.shape)
            if needs_x:
                dx = input_gradient(rows, weight, ctx.shape)
        return given, dx, None, None, da, db, None, None, None, None


def _rows(ctx: Any, saved: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """x as a matrix in `dtype`."""
    if ctx.recompute is None:
        (x,) = saved
    else:
        x = ctx.recomputed.rows(ctx.recompute, saved, dtype)
    return x.reshape(-1, x.size(-1)).to(dtype)
