"""The MS-norms in plain PyTorch: the formulas, and the code that runs where the Triton kernels do not.

    RMS:        x_hat = x * rstd              rstd = 1 / sqrt(mean(x^2) + eps)
    LayerNorm:  x_hat = (x - mean(x)) * rstd  rstd = 1 / sqrt(mean((x - mean(x))^2) + eps)
    output:     y = (offset + weight) * x_hat + bias

    backward:   g = dy * (offset + weight)
                dx = rstd * (g - x_hat * mean(g * x_hat))                  (LayerNorm: also - mean(g) inside)
                dweight = sum over rows of dy * x_hat,   dbias = sum over rows of dy

Statistics and sums are in fp32 for 16-bit and fp32 inputs, in fp64 for fp64. No argument is written to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from memopt.kernels.base.autograd import accumulation_dtype


@dataclass(frozen=True)
class NormSpec:
    """The numeric family of a norm, without its parameters."""

    kind: Literal["rms", "layer"]
    eps: float | None
    """None for the machine epsilon of the dtype that the statistics are computed in, as in ``nn.RMSNorm(eps=None)``."""
    offset: Literal[0, 1] = 0
    """1 for the (1 + weight) family."""
    cast: Literal["before", "after"] = "after"
    """Whether x_hat is rounded to the input's dtype before or after it is scaled by the weight."""

    def eps_in(self, dtype: torch.dtype) -> float:
        """eps for an input of `dtype`."""
        return torch.finfo(accumulation_dtype(dtype)).eps if self.eps is None else self.eps

    def in_dtype(self, dtype: torch.dtype) -> NormArguments:
        """This norm with one dtype for input, output and x_hat."""
        return NormArguments(self, dtype, dtype, dtype)


@dataclass(frozen=True)
class NormArguments:
    """The arguments of a norm beside its tensors: the family, and the dtypes of input, output and x_hat."""

    spec: NormSpec
    x_dtype: torch.dtype
    """Dtype of the input, and so of its gradient."""
    dtype: torch.dtype
    """Dtype of the output."""
    kept_dtype: torch.dtype
    """Dtype of the saved x_hat."""
    keeps_input: bool = False
    """Whether x is saved, in the same dtype, in the place of x_hat; for kind "rms" with an affine."""
    copies_output: bool = False
    """Whether an output that would be x_hat itself is a copy of it, which other code may change in place."""

    casts: bool = field(init=False)
    """Whether the output is another tensor than x_hat even without weight and bias."""

    rounds_anew: bool = field(init=False)
    """Whether the output, recomputed from x_hat in `kept_dtype`, may differ from the forward's by rounding."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "casts", self.dtype is not self.kept_dtype)
        scaled = self.x_dtype if self.spec.cast == "before" else accumulation_dtype(self.x_dtype)
        is_rounded = torch.promote_types(self.kept_dtype, scaled) != self.kept_dtype
        object.__setattr__(self, "rounds_anew", is_rounded and not self.keeps_input)


def normalize(x: Tensor, spec: NormSpec) -> tuple[Tensor, Tensor]:
    """x_hat (..., hidden) and rstd (..., 1), both in the accumulation dtype (fp32; fp64 for fp64).

    As in the stock norms, kind "rms" keeps the strides of x if x has no gaps, and kind "layer" is contiguous.
    """
    wide = x.to(accumulation_dtype(x.dtype))
    is_own = wide.dtype != x.dtype and not wide.requires_grad
    if spec.kind == "layer":
        if x.dtype == wide.dtype and x.size(-1):
            # The stock kernel: to the last bit what nn.LayerNorm computes, without temporaries of the input's size.
            x_hat, _, rstd = torch.native_layer_norm(x, [x.size(-1)], None, None, spec.eps_in(x.dtype))
            return x_hat, rstd
        # For 16-bit inputs the stock kernel is less exact than this: it multiplies before it subtracts the mean.
        wide = wide.contiguous()
        mean = wide.mean(-1, keepdim=True)
        wide = wide.sub_(mean) if is_own else wide - mean
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + spec.eps_in(x.dtype))
    # Return an alias with version 0: a tensor that counts as changed in place would not be recomputed.
    return (wide.mul_(rstd).data if is_own else wide * rstd), rstd


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
            # If y is cast below, nothing else refers to it: adding in place saves a temporary of the input's size.
            is_own = weight is not None and y.dtype != dtype
            y = y.add_(bias.to(y.dtype)) if is_own else y + bias.to(y.dtype)
    return y.to(dtype)


def norm_backward(
    dy: Tensor,
    x_hat: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    spec: NormSpec,
    needs: tuple[bool, bool, bool],
    of_input: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx (..., hidden), dweight (hidden,), dbias (hidden,) in the accumulation dtype; None if not needed. With
    `of_input`, `x_hat` is x."""
    dy, x_hat = dy.to(rstd.dtype), x_hat.to(rstd.dtype)
    if of_input:
        x_hat = x_hat * rstd
    dx = dweight = dbias = None
    if needs[0]:
        g = dy
        if weight is not None:
            scale = weight.to(rstd.dtype)
            g = dy * (scale + 1 if spec.offset else scale)
        dx = torch.addcmul(g, x_hat, (g * x_hat).mean(-1, keepdim=True), value=-1)
        if spec.kind == "layer":
            dx.sub_(g.mean(-1, keepdim=True))
        dx.mul_(rstd)
    rows = tuple(range(dy.dim() - 1))
    if needs[1]:
        dweight = (dy * x_hat).sum(rows) if rows else dy * x_hat
    if needs[2]:
        dbias = dy.sum(rows) if rows else dy.clone()
    return dx, dweight, dbias
