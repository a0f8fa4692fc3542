"""Faults in patched norms, each in one of the model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memopt.kernels.norm import function as norm
from memopt.kernels.norm import ops
from tests.mutation.acting import (
    Gradients,
    changed_at,
    changed_in_backward,
    gradients_changed,
    recomputed_as,
    scaled,
)
from tests.mutation.planted import in_modules
from tests.mutation.site import Site

_WITH_AFFINE = ("bert", "vit", "mixtral", "t5", "qwen3_moe", "gemma2")
_FOLDED = ("llama", "gpt2", "mixtral", "gemma2", "t5", "qwen3_moe", "phi3")
_LAYER_NORMS = ("bert", "vit")
_UNFOLDED = "exact-unfolded"
"""For faults in weights and biases, which folded norms lack."""
_RECOMPUTED = ("bert", "vit", "llama", "mixtral", "phi3")
"""Where no norm is folded, linears recompute the output of their first norms (of Qwen3, chains do)."""


def _backward(site: Site, change: Callable[..., Gradients]) -> Any:
    """`norm_ops.backward` of a norm at the site is change(backward, dy, x_hat, rstd, weight, arguments, needs)."""
    return changed_in_backward(site, ops, "backward", change, norm.NormFunction)


def norm_forward(site: Site, change: Callable[..., tuple[Any, ...]]) -> Any:
    """`norm_ops.forward` at the site is change(forward, x, weight, bias, arguments, residual)."""
    return changed_at(site, ops, "forward", change)


def _with_spec(stock: Any, *given: Any, **changes: Any) -> Any:
    """`stock` for a norm of another family."""
    arguments = given[_arguments(given)]
    spec = dataclasses.replace(arguments.spec, **changes)
    other = dataclasses.replace(arguments, spec=spec)
    return stock(*(other if each is arguments else each for each in given))


def _arguments(given: tuple[Any, ...]) -> int:
    return next(place for place, each in enumerate(given) if isinstance(each, norm.NormArguments))


# --- backward -------------------------------------------------------------------------------------------------------


@in_modules("norms", "no gradient of the weight", *_WITH_AFFINE, recipe=_UNFOLDED)
def _(site: Site) -> Any:
    return gradients_changed(site, norm.NormFunction, lambda ctx, found: scaled(found, 1, None))


@in_modules("norms", "no gradient of the bias", *_LAYER_NORMS, recipe=_UNFOLDED)
def _(site: Site) -> Any:
    return gradients_changed(site, norm.NormFunction, lambda ctx, found: scaled(found, 2, None))


@in_modules("norms", "the gradient of the weight is zero", *_WITH_AFFINE, recipe=_UNFOLDED)
def _(site: Site) -> Any:
    return gradients_changed(site, norm.NormFunction, lambda ctx, found: scaled(found, 1, 0.0))


@in_modules("norms", "the gradient of the weight is scaled", *_WITH_AFFINE, sized=True, recipe=_UNFOLDED)
def _(site: Site, size: float) -> Any:
    return gradients_changed(site, norm.NormFunction, lambda ctx, found: scaled(found, 1, 1 + size))


@in_modules("norms", "the gradient of the bias is scaled", *_LAYER_NORMS, sized=True, recipe=_UNFOLDED)
def _(site: Site, size: float) -> Any:
    return gradients_changed(site, norm.NormFunction, lambda ctx, found: scaled(found, 2, 1 + size))


@in_modules("norms", "the gradient of the input is scaled", *_WITH_AFFINE, sized=True, recipe=_UNFOLDED)
def _(site: Site, size: float) -> Any:
    return gradients_changed(site, norm.NormFunction, lambda ctx, found: scaled(found, 0, 1 + size))


@in_modules("norms", "the gradient of the input of a folded norm is scaled", *_FOLDED, sized=True)
def _(site: Site, size: float) -> Any:
    return gradients_changed(site, norm.NormFunction, lambda ctx, found: scaled(found, 0, 1 + size))


@in_modules("norms", "x_hat has the other sign in backward", *_WITH_AFFINE, recipe=_UNFOLDED)
def _(site: Site) -> Any:
    def change(stock: Any, dy: Tensor, x_hat: Tensor, *rest: Any) -> Gradients:
        # The formula of dx has x_hat twice, so its sign has no effect there.
        return stock(dy, x_hat, *rest)[0], *stock(dy, -x_hat, *rest)[1:]

    return _backward(site, change)


@in_modules("norms", "x_hat is off in backward", sized=True)
def _(site: Site, size: float) -> Any:
    return _backward(site, lambda stock, dy, x_hat, *rest: stock(dy, x_hat * (1 + size), *rest))


@in_modules("norms", "x_hat is that of another row in backward")
def _(site: Site) -> Any:
    return _backward(site, lambda stock, dy, x_hat, *rest: stock(dy, x_hat.roll(1, -2), *rest))


@in_modules("norms", "the projection on x_hat is missing in backward")
def _(site: Site) -> Any:
    def change(stock: Any, dy: Tensor, x_hat: Tensor, *rest: Any) -> Gradients:
        return stock(dy, torch.zeros_like(x_hat), *rest)[0], *stock(dy, x_hat, *rest)[1:]

    return _backward(site, change)


@in_modules("norms", "the mean of the gradient is not subtracted", *_LAYER_NORMS, "gpt2")
def _(site: Site) -> Any:
    return _backward(site, functools.partial(_with_spec, kind="rms"))


@in_modules("norms", "the statistics are those of another row in backward")
def _(site: Site) -> Any:
    return _backward(site, lambda stock, dy, x_hat, rstd, *rest: stock(dy, x_hat, rstd.roll(1, -2), *rest))


@in_modules("norms", "backward forgets the weight", *_WITH_AFFINE, recipe=_UNFOLDED)
def _(site: Site) -> Any:
    def change(stock: Any, dy: Tensor, x_hat: Tensor, rstd: Tensor, weight: Any, *rest: Any) -> Gradients:
        return stock(dy, x_hat, rstd, None, *rest)[0], *stock(dy, x_hat, rstd, weight, *rest)[1:]

    return _backward(site, change)


@in_modules("norms", "backward forgets the offset of (1 + weight)", "gemma2")
def _(site: Site) -> Any:
    return _backward(site, functools.partial(_with_spec, offset=0))


@in_modules("norms", "the gradient of the weight lacks a row", *_WITH_AFFINE, recipe=_UNFOLDED)
def _(site: Site) -> Any:
    def change(stock: Any, dy: Tensor, *rest: Any) -> Gradients:
        short = dy.clone()
        short[..., 0, :] = 0
        return stock(dy, *rest)[0], *stock(short, *rest)[1:]

    return _backward(site, change)


# --- forward --------------------------------------------------------------------------------------------------------


@in_modules("norms", "eps is off", sized=True)
def _(site: Site, size: float) -> Any:
    def change(stock: Any, *given: Any) -> tuple[Any, ...]:
        return _with_spec(stock, *given, eps=given[_arguments(given)].spec.eps * (1 + size))  # type: ignore[no-any-return]

    return norm_forward(site, change)


@in_modules("norms", "eps is ten times as large")
def _(site: Site) -> Any:
    def change(stock: Any, *given: Any) -> tuple[Any, ...]:
        return _with_spec(stock, *given, eps=given[_arguments(given)].spec.eps * 10)  # type: ignore[no-any-return]

    return norm_forward(site, change)


@in_modules("norms", "the mean is not subtracted", *_LAYER_NORMS, "gpt2")
def _(site: Site) -> Any:
    return norm_forward(site, functools.partial(_with_spec, kind="rms"))


@in_modules("norms", "part of the mean is not subtracted", *_LAYER_NORMS, "gpt2", sized=True)
def _(site: Site, size: float) -> Any:
    def change(stock: Any, x: Tensor, *given: Any) -> tuple[Any, ...]:
        y, x_hat, rstd = stock(x, *given)
        rest = (x.mean(-1, keepdim=True) * size * rstd).to(x_hat.dtype)
        return (None if y is None else y + rest), x_hat + rest, rstd

    return norm_forward(site, change)


@in_modules("norms", "the output is scaled", sized=True)
def _(site: Site, size: float) -> Any:
    def change(stock: Any, *given: Any) -> tuple[Any, ...]:
        y, x_hat, rstd = stock(*given)
        return (None, x_hat * (1 + size), rstd) if y is None else (y * (1 + size), x_hat, rstd)

    return norm_forward(site, change)


@in_modules("norms", "the bias is lost", *_LAYER_NORMS, recipe=_UNFOLDED)
def _(site: Site) -> Any:
    return norm_forward(site, lambda stock, x, weight, bias, *rest: stock(x, weight, 0 * bias, *rest))


# --- what readers recompute -----------------------------------------------------------------------------------------


@in_modules("norms", "the recomputed output is scaled", *_RECOMPUTED, sized=True, recipe=_UNFOLDED)
def _(site: Site, size: float) -> Any:
    return recomputed_as(site, norm, lambda y, *_: y * (1 + size))


@in_modules("norms", "the recomputed output lacks the bias", *_LAYER_NORMS, recipe=_UNFOLDED)
def _(site: Site) -> Any:
    return recomputed_as(site, norm, lambda y, x_hat, scale, shift, *_: y - norm._rows(scale, shift)[1])


@in_modules("norms", "the recomputed output is x_hat", *_RECOMPUTED, recipe=_UNFOLDED)
def _(site: Site) -> Any:
    return recomputed_as(site, norm, lambda y, x_hat, *_: x_hat.to(y.dtype))
