"""What the tests of the norms' kernels share: families, tensors, and how an error is judged against fp64 truth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from memopt.kernels.norm.forward_triton import launch_affine, launch_backward, launch_forward
from memopt.kernels.norm.function import (
    NormArguments,
    NormSpec,
    affine,
    norm_backward,
    normalize,
)
from tests.triton.conftest import DEVICE

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RMS, LAYER = ("rms", 0, True, False), ("layer", 0, True, True)
ALL = (True, True, True)


def draw(*shape: int, dtype: torch.dtype, scale: float = 1.0, shift: float = 0.0, seed: int = 0) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)
    return (values * scale + shift).to(DEVICE, dtype)


def parameters(family, hidden: int, dtype: torch.dtype, cast="after") -> tuple[Tensor | None, Tensor | None, NormSpec]:
    kind, offset, has_weight, has_bias = family
    weight = draw(hidden, dtype=dtype, seed=1) if has_weight else None
    bias = draw(hidden, dtype=dtype, seed=2) if has_bias else None
    return weight, bias, NormSpec(kind, 1e-5, offset, cast)


def double(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.double() for tensor in tensors]


def assert_as_good(ours: Tensor | None, reference: Tensor | None, truth: Tensor | None, terms: Tensor | None = None):
    """The error is at most 1.25 times the reference's plus one rounding of the result.

    The worst element may also have rounded, in fp32, at each of the formula's steps (five after the last sum). Where
    terms of opposite signs cancel, their sum without signs is what is rounded; `terms` is that sum.
    """
    if truth is None:
        assert ours is None
        return
    assert ours.shape == truth.shape
    terms = truth if terms is None else terms
    rounding = torch.finfo(ours.dtype).eps / 2
    steps = 5 * torch.finfo(torch.float32).eps / 2
    for size, allowance in ((root_mean_square, rounding), (largest, rounding + steps)):
        allowed = 1.25 * size(reference.double() - truth) + allowance * size(terms)
        assert size(ours.double() - truth) <= allowed


def root_mean_square(tensor: Tensor) -> Tensor:
    return tensor.square().mean().sqrt()


def largest(tensor: Tensor) -> Tensor:
    return tensor.abs().max()


def without_signs(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.double().abs() for tensor in tensors]


def check_forward(x, weight, bias, spec, dtype, kept_dtype) -> tuple[Tensor, Tensor]:
    y, x_hat, rstd = launch_forward(x, weight, bias, NormArguments(spec, x.dtype, dtype, kept_dtype))
    exact = double(x, weight, bias)
    true_x_hat, true_rstd = normalize(exact[0], spec)
    reference, reference_rstd = normalize(x, spec)
    assert x_hat.dtype == kept_dtype
    terms, condition = None, 0
    if spec.kind == "layer":
        mean = exact[0].mean(-1, keepdim=True).abs()
        terms, condition = (exact[0].abs() + mean) * true_rstd, mean * true_rstd
    assert_as_good(x_hat, reference.to(kept_dtype), true_x_hat, terms)
    # The interpreter makes two operations of rsqrt, and a GPU's own is as inexact: two roundings. Where a mean that is
    # updated is rounded, rstd changes by up to |mean| / deviation roundings (Chan, Golub and LeVeque 1983). E[x^2] -
    # E[x]^2 would change by the square of that.
    assert_as_good(rstd, reference_rstd, true_rstd, (2 + condition) * true_rstd)
    if weight is None and bias is None:
        assert y is None
    else:
        assert y.dtype == dtype
        expected = affine(reference, weight, bias, spec, x.dtype, dtype)
        check_affine(y, expected, true_x_hat, weight, bias, spec, terms)
    return x_hat, rstd


def check_affine(ours, reference, x_hat, weight, bias, spec, terms_of_x_hat=None) -> None:
    truth = affine(*double(x_hat, weight, bias), spec, torch.float64, torch.float64)
    terms = without_signs(x_hat if terms_of_x_hat is None else terms_of_x_hat, weight, bias)
    assert_as_good(ours, reference, truth, affine(*terms, spec, torch.float64, torch.float64))


def check_backward(dy, x_hat, rstd, weight, spec, needs, x_dtype, of_input: bool = False) -> None:
    arguments = replace(spec.in_dtype(x_dtype), keeps_input=of_input)
    ours = launch_backward(dy, x_hat, rstd, weight, arguments, needs)
    if of_input:  # as exact as x_hat in fp32 gives
        x_hat = x_hat.to(rstd.dtype) * rstd
    reference = list(norm_backward(dy, x_hat, rstd, weight, spec, needs))
    truth = norm_backward(*double(dy, x_hat, rstd, weight), spec, needs)
    if needs[0]:
        assert ours[0].dtype == x_dtype
        reference[0] = reference[0].to(x_dtype)
    terms = [None, None, None]
    if needs[0]:
        dy, x_hat, rstd, weight = without_signs(dy, x_hat, rstd, weight)
        g = dy if weight is None else dy * (weight + spec.offset)
        mean_g = g.mean(-1, keepdim=True) if spec.kind == "layer" else 0
        terms[0] = rstd * (g + x_hat * (g * x_hat).mean(-1, keepdim=True) + mean_g)
    for candidates in zip(ours, reference, truth, terms, strict=True):
        assert_as_good(*candidates)


def check(family, cast, dtype, rows: int, hidden: int, shift: float = 0.5) -> None:
    weight, bias, spec = parameters(family, hidden, dtype, cast)
    x = draw(rows, hidden, dtype=dtype, scale=2, shift=shift)
    x_hat, rstd = check_forward(x, weight, bias, spec, dtype, dtype)
    if weight is not None:
        recomputed = launch_affine(x_hat, weight, bias, spec.in_dtype(dtype))
        check_affine(recomputed, affine(x_hat, weight, bias, spec, dtype, dtype), x_hat, weight, bias, spec)
    needs = (True, weight is not None, bias is not None)
    dy = draw(rows, hidden, dtype=dtype, seed=3)
    check_backward(dy, x_hat, rstd, weight, spec, needs, dtype)
    if spec.kind == "rms" and weight is not None:
        check_kept_input(dy, x, rstd, weight, spec, needs)


def check_kept_input(dy, x, rstd, weight, spec, needs) -> None:
    """A norm that saves x in the place of x_hat: the same output, to the bit, and gradients of an x_hat in fp32."""
    arguments = spec.in_dtype(x.dtype)
    kept = replace(arguments, keeps_input=True)
    (y, _, _), (same, saved, rstd) = (launch_forward(x, weight, None, each) for each in (arguments, kept))
    assert torch.equal(y, same)
    assert saved is x
    check_backward(dy, x, rstd, weight, spec, needs, x.dtype, of_input=True)


def fused(dtype: torch.dtype) -> Tensor:
    return draw(2, 4, 3, 2, 24, dtype=dtype)


LAYOUTS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "the keys of a fused projection": lambda dtype: fused(dtype)[:, :, 1],
    "transposed heads": lambda dtype: fused(dtype)[:, :, 0].transpose(1, 2),
    "a slice of the columns": lambda dtype: fused(dtype)[..., 3:20],
    "four leading dimensions that do not merge": lambda dtype: fused(dtype).permute(3, 2, 1, 0, 4)[:, :, :3],
    "rows whose elements are not adjacent": lambda dtype: fused(dtype)[0, :2, 0].transpose(-1, -2),
    "every second column": lambda dtype: fused(dtype)[..., ::2],
    "expanded rows": lambda dtype: fused(dtype)[0, 0, 0, :1].expand(3, 4, 24),
    "one element expanded": lambda dtype: fused(dtype)[0, 0, 0, 0, 0].expand(3, 4, 24),
    "one column": lambda dtype: fused(dtype)[..., :1],
    "one row": lambda dtype: fused(dtype)[0, 0, 0, 0],
}
