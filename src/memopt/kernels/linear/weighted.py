"""A product whose rows are weighted, as one function: the gradient of the weights needs no output of the product.

    forward     z = s y,   y = a W + b
    backward    p = dz W^T,   da = s p,   ds = <p, a> + <dz, b> for each row,   dW = a^T (s dz),   db = s dz

Experts of a router, and shared experts behind a gate. Autograd saves y for ds = <dz, y>, which is as wide as the hidden
states, once for each expert of a token. The product that da takes anyway serves ds too, so y is not saved and no
product is added; dW and db are autograd's to the bit. Source: SonicMoE, arXiv 2512.14080.

Whoever calls products tells :class:`Products` what they are made of, while some are followed.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from memopt.kernels.base.autograd import DirectFunction, refuse_double_backward, without_autocast
from memopt.recompute.specs import RecomputeSpec
from memopt.torch_compat import grouped_mm


@dataclass(frozen=True)
class Product:
    """y = a W + b."""

    a: Tensor
    """(..., in), with its graph."""
    matrix: Tensor
    """W: (in, out); one for each of a's matrices, (n, in, out); or where there are offsets one for each expert."""
    offsets: Tensor | None = None
    """(experts,): where the rows of each expert end."""
    spec: RecomputeSpec | None = None
    """What `a` is recomputed from, where that is saved instead."""
    bias: Tensor | None = None
    """With its graph; broadcast to y."""
    chosen: tuple[Tensor, Tensor] | None = None
    """(rows, index): the bias is ``rows[index]``, which is as large as y, and these are saved instead."""
    dtype: torch.dtype | None = None
    """In which the product was computed; None until it was."""


class Products:
    """The outputs of products of which it is known what they are made of, while they live."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int, Product]] = {}

    def note(self, y: Tensor, product: Product) -> None:
        if y.requires_grad:
            key = id(y)
            reference = weakref.ref(y, lambda _: self._known.pop(key, None))
            self._known[key] = reference, y._version, product if product.dtype else replace(product, dtype=y.dtype)

    def of(self, y: Tensor) -> Product | None:
        """What `y` is made of; None where that is not known, or where it was changed in place since."""
        known = self._known.get(id(y))
        return known[2] if known is not None and known[0]() is y and known[1] == y._version else None


class _Followed(threading.local):
    products: Products | None = None


#: Its `products` are noted by linears of ours in this thread; None where nobody looks at them.
followed = _Followed()


def noted(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, spec: RecomputeSpec | None) -> Tensor:
    """`y`, which is ``F.linear(x, weight, bias)``, noted. Callers ask first whether products are followed."""
    assert followed.products is not None
    followed.products.note(y, Product(x, weight.t(), spec=spec, bias=bias))
    return y


def weighted(y: Tensor, s: Tensor, product: Product) -> Tensor:
    """``y * s``, for which neither y nor anything of its size is saved.

    Args:
        y: (..., out), what `product` says.
        s: (..., 1) or a number in a tensor, broadcast to y.

    Returns:
        z: like y. It can be differentiated once; the graph of y is not used.
    """
    z: Tensor = WeightedFunction.apply(y.detach(), s, product.a, product.matrix, product.bias, product)
    return z


class WeightedFunction(DirectFunction):
    """Saves the product's input, or what that is recomputed from, and the weights of the rows; not the product."""

    __memopt_saves__ = "linear input"

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, s: Tensor, a: Tensor, matrix: Tensor, bias: Tensor | None, product: Product
    ) -> Tensor:
        spec = product.spec
        ctx.input, ctx.dtype, ctx.shape = None if spec is None else spec.recomputed, product.dtype, a.shape
        ctx.bias_shape = None if bias is None else bias.shape
        saved = (a,) if spec is None else spec.take()
        ctx.save_for_backward(s, matrix, product.offsets, *(product.chosen or (bias, None)), *saved)
        return y * s

    @staticmethod
    @without_autocast
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        s, matrix, offsets, bias, index, *saved = ctx.saved_tensors
        _, _, _, needs_matrix, needs_bias, _ = ctx.needs_input_grad
        a = saved[0].to(ctx.dtype) if ctx.input is None else ctx.input.rows(saved, ctx.dtype)
        matrix, dmatrix, dbias = matrix.to(ctx.dtype), None, None
        # Matrices of rows as the product had them, without what `expand` left of a gradient.
        shape = (*ctx.shape[:-1], dz.size(-1)) if matrix.dim() == 3 else (-1, dz.size(-1))
        a = a.reshape(*shape[:-1], ctx.shape[-1])
        if needs_matrix or needs_bias:
            dy = (dz * s).to(ctx.dtype)
            dmatrix = _of_matrix(a, dy.reshape(shape), matrix, offsets) if needs_matrix else None
            dbias = dy.sum_to_size(ctx.bias_shape) if needs_bias else None
            del dy
        p = _product(dz.to(ctx.dtype).reshape(shape).contiguous(), matrix.mT, offsets)
        ds = _dot(p, a).view(*dz.shape[:-1], 1)
        del a
        if bias is not None:
            ds += _dot(dz, (bias if index is None else bias[index]).to(ctx.dtype))
        da = p.view(*dz.shape[:-1], ctx.shape[-1]).mul_(s).view(ctx.shape)
        return None, ds.sum_to_size(s.shape), da, dmatrix, dbias, None


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """<x, y> of each row, summed in fp32 at least."""
    return (x * y).sum(-1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))


def _product(x: Tensor, matrix: Tensor, offsets: Tensor | None) -> Tensor:
    y: Tensor = x @ matrix if offsets is None else grouped_mm(x, matrix, offs=offsets)
    return y


def _of_matrix(a: Tensor, dy: Tensor, matrix: Tensor, offsets: Tensor | None) -> Tensor:
    """a^T dy in the layout of the matrix, as autograd computes it."""
    if matrix.stride(-2) == 1 and matrix.stride(-1) == matrix.size(-2):
        return _product(dy.mT, a, offsets).mT
    return _product(a.mT, dy, offsets)
