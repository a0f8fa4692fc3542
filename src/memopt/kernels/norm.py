"""MS-LayerNorm and MS-RMSNorm: norms whose backward uses their normalised output, with or without an affine.

    RMS:        x_hat = x * rstd              rstd = 1 / sqrt(mean(x^2) + eps)
    LayerNorm:  x_hat = (x - mean(x)) * rstd  rstd = 1 / sqrt(mean((x - mean(x))^2) + eps)
    output:     y = (offset + weight) * x_hat + bias

    backward:   g = dy * (offset + weight)
                dx = rstd * (g - x_hat * mean(g * x_hat))                  (LayerNorm: also - mean(g) inside)
                dweight = sum over rows of dy * x_hat,   dbias = sum over rows of dy

Kept for backward: x_hat in the compute dtype, rstd (fp32, one per row) and a copy of the affine (one row); never the
input. Without an affine y is x_hat, one storage with what the next linear keeps. With one, y can be made again from
x_hat, weight and bias, so whoever keeps y inside a `memopt.saved.RecomputeScope` keeps a handle.

Source: LowMemoryBP, ICML 2024, arXiv 2406.16282 (MS-norms); keeping x_hat before the affine avoids the division by
the weight of output-based norms (Tempo, arXiv 2210.10246), which fails where a weight is near zero.

Statistics and sums are in fp32 for 16-bit and fp32 inputs, in fp64 for fp64. Nothing is written in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from memopt.kernels.autograd import refuse_double_backward
from memopt.saved.rules import Node, recomputable


@dataclass(frozen=True)
class NormSpec:
    """Which norm: the numeric family, without its parameters."""

    kind: Literal["rms", "layer"]
    eps: float
    offset: Literal[0, 1] = 0
    """1 for the (1 + weight) family."""
    cast: Literal["before", "after"] = "after"
    """Whether x_hat is rounded to the input's dtype before or after it is scaled by the weight."""


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
    if weight is None and bias is None:
        y: Tensor = NormalizeFunction.apply(x, spec, dtype)  # type: ignore[no-untyped-call]
    else:
        y = NormFunction.apply(  # type: ignore[no-untyped-call]
            x, weight, bias, spec, dtype, kept_dtype or dtype
        )
    return y


def normalize(x: Tensor, spec: NormSpec) -> tuple[Tensor, Tensor]:
    """x_hat (..., hidden) and rstd (..., 1), both in the accumulation dtype (fp32; fp64 for fp64)."""
    x = x.to(accumulation_dtype(x.dtype))
    if spec.kind == "layer":
        x = x.contiguous()  # as the native LayerNorm does; norms composed of elementwise steps keep strides
        x = x - x.mean(-1, keepdim=True)
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + spec.eps)
    return x * rstd, rstd


def affine(
    x_hat: Tensor, weight: Tensor | None, bias: Tensor | None, spec: NormSpec, x_dtype: torch.dtype, dtype: torch.dtype
) -> Tensor:
    """(offset + weight) * x_hat + bias in `dtype`, rounded in the order that `spec.cast` says."""
    if spec.cast == "before":
        y = x_hat.to(x_dtype)
        if weight is not None:
            y = (weight + 1 if spec.offset else weight) * y
        if bias is not None:
            y = y + bias
    else:
        y = x_hat.to(accumulation_dtype(x_hat.dtype))
        if weight is not None:
            scale = weight.to(y.dtype)
            y = y * (scale + 1 if spec.offset else scale)
        if bias is not None:
            y = y + bias.to(y.dtype)
    return y.to(dtype)


def norm_backward(
    dy: Tensor, x_hat: Tensor, rstd: Tensor, weight: Tensor | None, spec: NormSpec, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx (..., hidden), dweight (hidden,), dbias (hidden,) in the accumulation dtype; None where not needed."""
    dy, x_hat = dy.to(rstd.dtype), x_hat.to(rstd.dtype)
    dx = dweight = dbias = None
    if needs[0]:
        g = dy
        if weight is not None:
            scale = weight.to(rstd.dtype)
            g = dy * (scale + 1 if spec.offset else scale)
        inner = g - x_hat * (g * x_hat).mean(-1, keepdim=True)
        if spec.kind == "layer":
            inner = inner - g.mean(-1, keepdim=True)
        dx = rstd * inner
    rows = tuple(range(dy.dim() - 1))
    if needs[1]:
        dweight = (dy * x_hat).sum(rows) if rows else dy * x_hat
    if needs[2]:
        dbias = dy.sum(rows) if rows else dy
    return dx, dweight, dbias


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class NormalizeFunction(torch.autograd.Function):
    """Norm without an affine: the output is the kept x_hat."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: NormSpec, dtype: torch.dtype) -> Tensor:
        exact, rstd = normalize(x, spec)
        x_hat = exact.to(dtype)
        ctx.spec, ctx.x_dtype = spec, x.dtype
        ctx.save_for_backward(x_hat, rstd)
        return x_hat

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None]:
        refuse_double_backward()
        x_hat, rstd = ctx.saved_tensors
        dx, _, _ = norm_backward(dy, x_hat, rstd, None, ctx.spec, (True, False, False))
        return (None if dx is None else dx.to(ctx.x_dtype)), None, None


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
    ) -> Tensor:
        exact, rstd = normalize(x, spec)
        ctx.spec, ctx.x_dtype, ctx.dtype, ctx.remakes_output = spec, x.dtype, dtype, True
        # Copies, one row each: a sharding tool may have freed the parameter's own storage when a reader of the
        # output, in another shard unit, runs its backward first.
        copies = [None if parameter is None else parameter.detach().clone() for parameter in (weight, bias)]
        ctx.save_for_backward(exact.to(kept_dtype), rstd, *copies)
        return affine(exact, weight, bias, spec, x.dtype, dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        refuse_double_backward()
        x_hat, rstd, weight, bias = ctx.saved_tensors
        dx, dweight, dbias = norm_backward(dy, x_hat, rstd, weight, ctx.spec, ctx.needs_input_grad[:3])
        return (
            None if dx is None else dx.to(ctx.x_dtype),
            None if dweight is None else dweight.to(weight.dtype),
            None if dbias is None else dbias.to(bias.dtype),
            None,
            None,
            None,
        )


@recomputable("NormFunctionBackward", "norm", lambda node: getattr(node, "remakes_output", False))
def _output(node: Node) -> Tensor:
    x_hat, _, weight, bias = node.saved_tensors
    return affine(x_hat, weight, bias, node.spec, node.x_dtype, node.dtype)
