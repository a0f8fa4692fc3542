"""MS-LayerNorm and MS-RMSNorm: norms whose backward uses their normalised output, with or without an affine.

Saved for backward: x_hat in the compute dtype, rstd (fp32, one per row) and a copy of the affine (one row), not the
input. An input that is a sum need not even be stored. Without an affine y is x_hat, and the next linear saves the same
storage. With an affine, y is recomputed from x_hat, weight and bias: readers of y save these, or a handle inside a
`memopt.saved.RecomputeScope`. Where that would round y anew, the input may be saved in the place of x_hat.

The formulas are in `memopt.kernels.norm.reference`, the Triton kernels in `*_triton`, the choice between them in `ops`.

Source: LowMemoryBP, ICML 2024, arXiv 2406.16282 (MS-norms); keeping x_hat before the affine avoids the division by
the weight of output-based norms (Tempo, arXiv 2210.10246), which fails where a weight is near zero.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from memopt.kernels.base.autograd import refuse_double_backward
from memopt.kernels.norm import ops as norm_ops
from memopt.kernels.norm.reference import NormArguments, NormSpec, affine, norm_backward, normalize
from memopt.recompute.rules import NORMALISED, register_operator
from memopt.recompute.specs import Recompute, Recomputed, attach_spec
from memopt.torch_compat import DirectFunction

__all__ = ["NormArguments", "NormSpec", "affine", "ms_norm", "norm_backward", "normalize"]


def ms_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    spec: NormSpec,
    dtype: torch.dtype,
    kept_dtype: torch.dtype | None = None,
    shares: bool = False,
    residual: Tensor | None = None,
    keeps_input: bool = False,
    copies_output: bool = False,
) -> Tensor:
    """Norm over the last dimension that keeps x_hat and rstd for backward.

    Args:
        x: (..., hidden), floating point; any strides.
        weight, bias: (hidden,) or None; without both, y is x_hat, and must not be changed in place before backward.
        spec: family, eps, offset, casting order.
        dtype: dtype of the result.
        kept_dtype: dtype of the saved x_hat (autocast's) if the result has another one; `dtype` by default.
        shares: whether linears read the result and share a cast of it to `kept_dtype`.
        residual: of the shape and dtype of `x`. The norm is computed of ``x + residual``, with the rounding of that
            sum; Triton kernels do not store the sum.
        keeps_input: save `x` in the place of x_hat if that takes no more bytes and the output, recomputed from x_hat,
            would be rounded otherwise than in the forward: a 16-bit RMS norm that rounds after its weight. `x` must not
            be changed in place afterwards.
        copies_output: return a copy where y would be x_hat, so that y may be changed in place. Readers save x_hat.

    Returns:
        y: (..., hidden) in `dtype`.

    Raises:
        ValueError: `x` and `residual` differ in shape or dtype.
    """
    y: Tensor
    bare = weight is None and bias is None
    kept_dtype = kept_dtype or dtype
    if torch.compiler.is_compiling():
        options = (spec.kind, spec.eps_in(x.dtype), spec.offset, spec.cast, dtype, kept_dtype)
        y, *_ = norm_ops.ms_norm(x, weight, bias, *options, residual)
        return y
    kept_dtype = kept_dtype if shares or not bare else dtype
    arguments, recompute, narrow = _plan(spec, x.dtype, dtype, kept_dtype, copies_output=copies_output and bare)
    if keeps_input and arguments.rounds_anew and residual is None and _may_be_kept(x, weight, arguments):
        arguments, recompute, narrow = _plan(spec, x.dtype, dtype, kept_dtype, True)
    saved: list[Any] = []
    y = NormFunction.apply(x, weight, bias, arguments, saved, residual)
    x_hat, scale, shift, recomputed = saved
    if arguments.casts or arguments.copies_output or not bare:
        cast = narrow if shares and dtype is not kept_dtype else None
        recomputed.function = recompute
        attach_spec(y, (x_hat, scale, shift), recomputed, are_private=not arguments.keeps_input, narrow=cast)
    elif not y.is_contiguous():  # a linear would save its rows as a copy, beside the x_hat that the norm saves
        recomputed.function = lambda x_hat: x_hat
        attach_spec(y, (y.detach(),), recomputed)
    return y


@functools.lru_cache(maxsize=256)
def _plan(
    spec: NormSpec,
    x_dtype: torch.dtype,
    dtype: torch.dtype,
    kept_dtype: torch.dtype,
    keeps_input: bool = False,
    copies_output: bool = False,
) -> tuple[NormArguments, Recompute, Recompute]:
    """A norm's arguments beside its tensors, and functions that recompute its output in `dtype` and in `kept_dtype`."""

    def recompute(arguments: NormArguments) -> Recompute:
        return lambda x_hat, scale, shift, *_: norm_ops.recompute_output(x_hat, *_rows(scale, shift), arguments)

    arguments = NormArguments(spec, x_dtype, dtype, kept_dtype, keeps_input, copies_output)
    return arguments, recompute(arguments), recompute(replace(arguments, dtype=kept_dtype))


def _may_be_kept(x: Tensor, weight: Tensor | None, arguments: NormArguments) -> bool:
    """Whether x has the bytes of x_hat, and is no part of a larger tensor and no parameter: sharding may free that."""
    is_alike = weight is not None and arguments.spec.kind == "rms" and x.dtype is arguments.kept_dtype
    return is_alike and x.grad_fn is not None and x.untyped_storage().nbytes() == x.nbytes


def _room(weight: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """An empty tensor for copies of weight or bias (hidden,), or of both (2, hidden).

    None without an affine, or for two dtypes. Copies, because sharded training may free a parameter's storage before a
    reader of the output, in another shard unit, runs its backward. One tensor, because each takes time to save.
    """
    if weight is None or bias is None:
        parameter = bias if weight is None else weight
        return None if parameter is None else parameter.new_empty(parameter.shape)
    return weight.new_empty((2, *weight.shape)) if weight.dtype is bias.dtype else None


def _rows(scale: Tensor | None, shift: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias from the saved copies: both in one tensor (:func:`_room`), or each in its own."""
    if scale is None or scale.dim() == 1:
        return scale, shift
    weight, bias = scale.unbind()
    return weight, bias


class NormFunction(DirectFunction):
    """Saves x_hat. The output is recomputed from x_hat, or is x_hat if there is no affine, no cast and no copy."""

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
        """Appends x_hat, the copies of the affine (two items) and the node's `Recomputed` to `saved`."""
        ctx.arguments, ctx.recomputed = arguments, Recomputed()
        computes = weight is not None or bias is not None or arguments.casts
        ctx.recomputes_output = computes or arguments.copies_output
        ctx.saves_output, ctx.rounds_anew = not ctx.recomputes_output, computes and arguments.rounds_anew
        scale, shift = _room(weight, bias), None
        y, x_hat, rstd = norm_ops.forward(x, weight, bias, arguments, residual, scale)
        if weight is None:
            scale, shift = None, scale
        elif scale is None and bias is not None:
            scale, shift = weight.clone(), bias.clone()
        ctx.save_for_backward(x_hat, scale, shift, rstd)
        saved += (x_hat, scale, shift, ctx.recomputed)
        if ctx.recomputes_output:
            return x_hat.clone() if y is None else y
        return x_hat

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        ctx.recomputed.finish()
        x_hat, scale, shift, rstd = ctx.saved_tensors
        weight = scale if scale is None or scale.dim() == 1 else scale[0]
        x_needs, weight_needs, bias_needs, _, _, residual_needs = ctx.needs_input_grad
        needs = (x_needs or residual_needs, weight_needs, bias_needs)
        # Autograd casts a gradient that is not in the dtype of its parameter.
        dtype = torch.float32 if scale is None or shift is not None else scale.dtype
        dx, dweight, dbias = norm_ops.backward(dy, x_hat, rstd, weight, ctx.arguments, needs, dtype)
        # Both terms of a sum get the same tensor as gradient, as in autograd's addition.
        return dx if x_needs else None, dweight, dbias, None, None, dx if residual_needs else None


register_operator("NormFunctionBackward", NORMALISED)
