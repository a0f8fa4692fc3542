"""MS-LayerNorm and MS-RMSNorm: norms whose backward uses their normalised output, with or without an affine.

Saved for backward: x_hat in the compute dtype, rstd (fp32, one per row) and a copy of the affine (one row); never the
input, which need not be made where it is a sum. Without an affine y is x_hat, one storage with what the next linear
saves. With one, y is recomputed from x_hat, weight and bias: its readers save those, or a handle inside a
`memopt.saved.RecomputeScope`.

The formulas are in `memopt.kernels.norm.reference`, the Triton kernels in `*_triton`, the choice between them in `ops`.

Source: LowMemoryBP, ICML 2024, arXiv 2406.16282 (MS-norms); keeping x_hat before the affine avoids the division by
the weight of output-based norms (Tempo, arXiv 2210.10246), which fails where a weight is near zero.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from memopt.kernels.base.autograd import DirectFunction, refuse_double_backward
from memopt.kernels.base.precision import accumulation_dtype
from memopt.kernels.norm import ops as norm_ops
from memopt.kernels.norm.reference import (
    NormArguments,
    NormSpec,
    affine,
    norm_backward,
    normalize,
)
from memopt.recompute_rules import NORMALISED, Node, recomputable
from memopt.recompute_specs import Recompute, Recomputed, attach_spec, is_under_foreign_hooks

__all__ = [
    "NormArguments",
    "NormSpec",
    "accumulation_dtype",
    "affine",
    "ms_norm",
    "ms_norm_of_sum",
    "norm_backward",
    "normalize",
]


def ms_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    spec: NormSpec,
    dtype: torch.dtype,
    kept_dtype: torch.dtype | None = None,
) -> Tensor:
    """Norm over the last dimension that keeps x_hat and rstd for backward.

    Args:
        x: (..., hidden), floating point.
        weight, bias: (hidden,) or None; without both, y is x_hat.
        spec: family, eps, offset, casting order.
        dtype: dtype of the result: x.dtype, or the autocast dtype where all readers are linears.
        kept_dtype: dtype of the kept x_hat where it is not the result; `dtype` by default.

    Returns:
        y: (..., hidden) in `dtype`.
    """
    return _norm(x, None, weight, bias, spec, dtype, kept_dtype or dtype)


def ms_norm_of_sum(
    a: Tensor,
    b: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    spec: NormSpec,
    dtype: torch.dtype,
    kept_dtype: torch.dtype | None = None,
) -> Tensor:
    """``ms_norm(a + b, ...)``, rounding included; where Triton runs, the sum is not made.

    Args:
        a, b: (..., hidden), floating point, of one shape and dtype; any strides.

    Raises:
        ValueError: a and b differ in shape or dtype.
    """
    return _norm(a, b, weight, bias, spec, dtype, kept_dtype or dtype)


def _norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    spec: NormSpec,
    dtype: torch.dtype,
    kept_dtype: torch.dtype,
) -> Tensor:
    y: Tensor
    bare = weight is None and bias is None
    if torch.compiler.is_compiling():
        if bare:
            y, _ = norm_ops.ms_normalize(x, spec.kind, spec.eps_in(x.dtype), dtype, residual)
        else:
            options = (spec.kind, spec.eps_in(x.dtype), spec.offset, spec.cast, dtype, kept_dtype)
            y, _, _ = norm_ops.ms_norm(x, weight, bias, *options, residual)
    elif bare:
        arguments, _ = _plan(spec, x.dtype, dtype, dtype)
        recomputed = Recomputed()
        y = NormalizeFunction.apply(x, arguments, recomputed, residual)
        if not y.is_contiguous():  # a linear would save its rows as a copy, beside the x_hat that the norm saves
            attach_spec(y, (y.detach(),), lambda x_hat: x_hat, recomputed)
    else:
        arguments, recompute = _plan(spec, x.dtype, dtype, kept_dtype)
        saved: list[Any] = []
        y = NormFunction.apply(x, weight, bias, arguments, saved, residual)
        x_hat, scale, shift, recomputed = saved
        attach_spec(y, (x_hat, scale, shift), recompute, recomputed, are_private=True)
    return y


@functools.lru_cache(maxsize=256)
def _plan(
    spec: NormSpec, x_dtype: torch.dtype, dtype: torch.dtype, kept_dtype: torch.dtype
) -> tuple[NormArguments, Recompute]:
    """What a norm is called with beside its tensors, and how its output is recomputed."""
    arguments = NormArguments(spec, x_dtype, dtype, kept_dtype)
    return arguments, lambda x_hat, scale, shift: norm_ops.recompute_output(x_hat, *_rows(scale, shift), arguments)


def _copied(weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Copies of the affine to save; under foreign hooks one tensor (2, hidden) for both, where they have one dtype.

    Copies, because a sharding tool may have freed the parameter's own storage when a reader of the output, in another
    shard unit, runs its backward first. One, because such hooks (activation checkpointing's) take longer for a tensor
    than it takes to tell the rows apart; without them it is the other way round.
    """
    if weight is not None and bias is not None and weight.dtype is bias.dtype and is_under_foreign_hooks():
        return torch.stack((weight, bias)), None
    return None if weight is None else weight.clone(), None if bias is None else bias.clone()


def _rows(scale: Tensor | None, shift: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias of what :func:`_copied` gave."""
    if scale is None or scale.dim() == 1:
        return scale, shift
    weight, bias = scale.unbind()
    return weight, bias


class NormalizeFunction(DirectFunction):
    """Norm without an affine: the output is the kept x_hat."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, arguments: NormArguments, recomputed: Recomputed, residual: Tensor | None
    ) -> Tensor:
        _, x_hat, rstd = norm_ops.forward(x, None, None, arguments, residual)
        ctx.arguments, ctx.recomputed = arguments, recomputed
        ctx.save_for_backward(x_hat, rstd)
        return x_hat

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        ctx.recomputed.finish()
        x_hat, rstd = ctx.saved_tensors
        dx, _, _ = norm_ops.backward(dy, x_hat, rstd, None, ctx.arguments, (True, False, False))
        x_needs, *_, residual_needs = ctx.needs_input_grad
        return norm_ops.of_both_terms(dx, x_needs, residual_needs, (None, None))


class NormFunction(DirectFunction):
    """Norm with an affine: x_hat is saved, the output is recomputed from it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        arguments: NormArguments,
        saved: list[Any],
        residual: Tensor | None,
    ) -> Tensor | None:
        """`saved` is given x_hat, the copy of the affine in two places and the node's `Recomputed`."""
        y, x_hat, rstd = norm_ops.forward(x, weight, bias, arguments, residual)
        ctx.arguments, ctx.recomputes_output, ctx.recomputed = arguments, True, Recomputed()
        scale, shift = _copied(weight, bias)
        ctx.save_for_backward(x_hat, rstd, scale, shift)
        saved += (x_hat, scale, shift, ctx.recomputed)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        ctx.recomputed.finish()
        x_hat, rstd, *copies = ctx.saved_tensors
        weight, bias = _rows(*copies)
        x_needs, weight_needs, bias_needs, _, _, residual_needs = ctx.needs_input_grad
        needs = (x_needs or residual_needs, weight_needs, bias_needs)
        dx, dweight, dbias = norm_ops.backward(dy, x_hat, rstd, weight, ctx.arguments, needs)
        if dweight is not None and weight is not None and dweight.dtype is not weight.dtype:
            dweight = dweight.to(weight.dtype)
        if dbias is not None and bias is not None and dbias.dtype is not bias.dtype:
            dbias = dbias.to(bias.dtype)
        return norm_ops.of_both_terms(dx, x_needs, residual_needs, (dweight, dbias, None, None))


@recomputable("NormFunctionBackward", NORMALISED, lambda node: getattr(node, "recomputes_output", False))
def _output(node: Node) -> Tensor:
    x_hat, _, *copies = node.saved_tensors
    return norm_ops.recompute_output(x_hat, *_rows(*copies), node.arguments)
