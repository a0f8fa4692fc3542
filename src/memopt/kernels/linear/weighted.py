"""A product whose rows are weighted, as one function: the gradient of the weights needs no output of the product.

    forward     z = s y,   y = a W + b
    backward    p = dz W^T,   da = s p,   ds = <p, a> + <dz, b> for each row,   dW = a^T (s dz),   db = s dz

For experts of a router, and shared experts with a gate. Autograd saves y for ds = <dz, y>; y is as wide as the hidden
states, and there is one for each expert of a token. The product p, needed for da anyway, gives ds too. So y is not
saved and no product is added; dW and db equal autograd's to the bit. Source: SonicMoE, arXiv 2512.14080.

While products are followed, the code that computes one notes its factors in :class:`Products`.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memopt.kernels.base.autograd import refuse_double_backward, without_autocast
from memopt.recompute.specs import RecomputeSpec
from memopt.recompute.versions import Noted
from memopt.torch_compat import DirectFunction, checkpointing_hook, grouped_mm


@dataclass(frozen=True)
class Product:
    """y = a W + b."""

    a: Tensor
    """(..., in), in the graph."""
    matrix: Tensor
    """W: (in, out), or (n, in, out): one for each of a's matrices or, with `offsets`, for each expert."""
    offsets: Tensor | None = None
    """(experts,): the end of each expert's rows."""
    spec: RecomputeSpec | None = None
    """The spec of `a`, if the spec's tensors are saved instead of `a`."""
    bias: Tensor | None = None
    """In the graph; broadcast to y."""
    chosen: tuple[Tensor, Tensor] | None = None
    """(rows, index), saved instead of the bias ``rows[index]``, which is as large as y."""
    dtype: torch.dtype | None = None
    """The dtype of the product; None until it was computed."""


class Products(Noted[Product]):
    """The products that computed tensors."""


class _Followed(threading.local):
    held: tuple[Products, object] | None = None
    """The products, and the checkpointed region in which they are followed."""

    @property
    def products(self) -> Products | None:
        """Where memopt's linears in this thread note their products; None if products are not followed.

        A checkpointed region further inside runs again without what follows products, so they are not followed there.
        """
        held = self.held
        return None if held is None or checkpointing_hook() is not held[1] else held[0]


followed = _Followed()


def noted(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, spec: RecomputeSpec | None) -> Tensor:
    """Note that `y` is ``F.linear(x, weight, bias)``, and return it. Only while products are followed."""
    assert followed.products is not None
    followed.products.note(y, Product(x, weight.t(), spec=spec, bias=bias, dtype=y.dtype))
    return y


def weighted(y: Tensor, s: Tensor, product: Product) -> Tensor:
    """``y * s``, which saves neither y nor any tensor of its size beside the input of the product.

    Args:
        y: (..., out), the output of `product`.
        s: (..., 1) or a number in a tensor, broadcast to y.

    Returns:
        z: like y. It can be differentiated once; the graph of y is not used.
    """
    z: Tensor = WeightedFunction.apply(y.detach(), s, product.a, product.matrix, product.bias, product)
    return z


class WeightedFunction(DirectFunction):
    """Saves the product's input, or the tensors that recompute it, and the weights of the rows; not the output."""

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
        # Matrices of rows in the product's shapes; dz is made contiguous below, since it may be expanded.
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
