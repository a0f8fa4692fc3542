"""MS-LayerNorm and MS-RMSNorm: norms whose backward uses their normalised output, with or without an affine.

Kept for backward: x_hat in the compute dtype, rstd (fp32, one per row) and a copy of the affine (one row); never the
input. Without an affine y is x_hat, one storage with what the next linear keeps. With one, y can be made again from
x_hat, weight and bias, so whoever keeps y inside a `memopt.saved.RecomputeScope` keeps a handle.

The formulas are in `norm_reference`, the Triton kernels in `norm_triton`, the choice between them in `norm_ops`.

Source: LowMemoryBP, ICML 2024, arXiv 2406.16282 (MS-norms); keeping x_hat before the affine avoids the division by
the weight of output-based norms (Tempo, arXiv 2210.10246), which fails where a weight is near zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memopt.kernels import norm_ops
from memopt.kernels.autograd import refuse_double_backward
from memopt.kernels.norm_reference import NormSpec, accumulation_dtype, affine, norm_backward, normalize
from memopt.saved.rules import Node, recomputable

__all__ = ["NormSpec", "accumulation_dtype", "affine", "ms_norm", "norm_backward", "normalize"]


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
    kept_dtype = kept_dtype or dtype
    y: Tensor
    if torch.compiler.is_compiling():
        if weight is None and bias is None:
            y, _ = norm_ops.ms_normalize(x, spec.kind, spec.eps, dtype)
        else:
            y, _, _ = norm_ops.ms_norm(x, weight, bias, spec.kind, spec.eps, spec.offset, spec.cast, dtype, kept_dtype)
    elif weight is None and bias is None:
        y = NormalizeFunction.apply(x, spec, dtype)  # type: ignore[no-untyped-call]
    else:
        y = NormFunction.apply(x, weight, bias, spec, dtype, kept_dtype)  # type: ignore[no-untyped-call]
    return y


class NormalizeFunction(torch.autograd.Function):
    """Norm without an affine: the output is the kept x_hat."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: NormSpec, dtype: torch.dtype) -> Tensor:
        _, x_hat, rstd = norm_ops.forward(x, None, None, spec, dtype, dtype)
        ctx.spec, ctx.x_dtype = spec, x.dtype
        ctx.save_for_backward(x_hat, rstd)
        return x_hat

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None]:
        refuse_double_backward()
        x_hat, rstd = ctx.saved_tensors
        dx, _, _ = norm_ops.backward(dy, x_hat, rstd, None, ctx.spec, (True, False, False), ctx.x_dtype)
        return dx, None, None


class NormFunction(torch.autograd.Function):
    """Norm with an affine: x_hat is kept, the output can be made again."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        spec: NormSpec,
        dtype: torch.dtype,
        kept_dtype: torch.dtype,
    ) -> Tensor | None:
        y, x_hat, rstd = norm_ops.forward(x, weight, bias, spec, dtype, kept_dtype)
        ctx.spec, ctx.x_dtype, ctx.dtype, ctx.remakes_output = spec, x.dtype, dtype, True
        # Copies, one row each: a sharding tool may have freed the parameter's own storage when a reader of the
        # output, in another shard unit, runs its backward first.
        copies = [None if parameter is None else parameter.detach().clone() for parameter in (weight, bias)]
        ctx.save_for_backward(x_hat, rstd, *copies)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        refuse_double_backward()
        x_hat, rstd, weight, bias = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        dx, dweight, dbias = norm_ops.backward(dy, x_hat, rstd, weight, ctx.spec, needs, ctx.x_dtype)
        return (
            dx,
            None if dweight is None else dweight.to(weight.dtype),
            None if dbias is None else dbias.to(bias.dtype),
            None,
            None,
            None,
        )


@recomputable("NormFunctionBackward", "norm", lambda node: getattr(node, "remakes_output", False))
def _output(node: Node) -> Tensor:
    x_hat, _, weight, bias = node.saved_tensors
    return norm_ops.remade_output(x_hat, weight, bias, node.spec, node.x_dtype, node.dtype)
