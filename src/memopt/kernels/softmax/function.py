"""A softmax whose output is recomputed in backward instead of being saved.

    forward     y = softmax(x)
    backward    dx = y (dy - sum(dy y))             x and y recomputed, once for all that read y

For attention scores x = q k^T scale + mask: the product saves q and k anyway, so the (..., L, S) probabilities need not
be saved, at the cost of one more product and softmax. FlashAttention (Dao et al. 2022, arXiv:2205.14135) does this in
one kernel; here a model's code may have any operations between product and softmax.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from memopt.kernels.base.autograd import autocast_as, is_batched, refuse_double_backward
from memopt.kernels.base.pieces import elementwise
from memopt.recompute.rules import PROBABILITIES, Node, recomputable
from memopt.recompute.specs import Recomputed
from memopt.torch_compat import DirectFunction

#: compute(read) -> the softmax's input
Compute = Callable[[Sequence[Tensor]], Tensor]


def recomputed_softmax(x: Tensor, dim: int, dtype: torch.dtype, compute: Compute, read: Sequence[Tensor]) -> Tensor:
    """``torch.softmax(x, dim, dtype=dtype)``, of which only `read` is saved.

    Args:
        x: floating point, of any shape.
        dtype: of the output, as wide as `x` or wider.
        compute: computes `x` from `read` and from saved tensors of nodes before `x`.
        read: tensors of any shape, without a graph.

    Returns:
        y: like `x`, in `dtype`. In a `memopt.saved.RecomputeScope` its readers save a handle. It can be differentiated
        once.
    """
    y: Tensor = RecomputedSoftmaxFunction.apply(x, dim, dtype, compute, *read)
    return y


class RecomputedSoftmaxFunction(DirectFunction):
    """Saves the tensors that recompute its input, apart from those that earlier nodes save."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, dtype: torch.dtype, compute: Compute, *read: Tensor) -> Tensor:
        ctx.compute, ctx.dim, ctx.dtypes = compute, -1 if dim == x.dim() - 1 else dim, (x.dtype, dtype)
        ctx.recomputed, ctx.kept = Recomputed(), None
        ctx.save_for_backward(*read)
        return _softmax(ctx, x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        ctx.recomputed.finish()
        with autocast_as(None, dy):
            kept, ctx.kept = _kept(ctx), None
            dx = _by_rows(ctx, functools.partial(_gradient, ctx), dy, kept)
        return dx, None, None, None, *(None for _ in ctx.needs_input_grad[4:])


def recomputed_tanh(x: Tensor, compute: Compute, read: Sequence[Tensor]) -> Tensor:
    """``torch.tanh(x)`` of soft-capped attention scores. Arguments and result are as in `recomputed_softmax`."""
    y: Tensor = RecomputedTanhFunction.apply(x, compute, *read)
    return y


class RecomputedTanhFunction(DirectFunction):
    """Saves the tensors that recompute its input. The softmax after it needs y too, and recomputes y first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, compute: Compute, *read: Tensor) -> Tensor:
        ctx.compute, ctx.kept, ctx.recomputed = compute, None, Recomputed()
        ctx.save_for_backward(*read)
        return torch.tanh(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        ctx.recomputed.finish()
        with autocast_as(None, dy):
            y, ctx.kept = _capped(ctx), None
            dx = torch.ops.aten.tanh_backward(dy, y)
        return dx, None, *(None for _ in ctx.needs_input_grad[2:])


@recomputable("RecomputedTanhFunctionBackward", PROBABILITIES)
def _capped(node: Node) -> Tensor:
    if node.kept is None:
        node.kept = torch.tanh(node.compute(node.saved_tensors))
    kept: Tensor = node.kept
    return kept


@recomputable("RecomputedSoftmaxFunctionBackward", PROBABILITIES)
def _output(node: Node) -> Tensor:
    node.kept = _kept(node)  # for the node's own backward, which runs next
    return _softmax(node, node.kept) if _widens(node) else node.kept


def _kept(node: Node) -> Tensor:
    """The recomputed output; if its dtype is wider than the input's, the recomputed input, which is half as large."""
    kept: Tensor | None = node.kept
    if kept is None:
        kept = node.compute(node.saved_tensors)
        if not _widens(node):
            kept = _softmax(node, kept)
    return kept


def _widens(node: Node) -> bool:
    narrow, wide = node.dtypes
    return narrow is not wide


def _softmax(node: Node, x: Tensor) -> Tensor:
    with autocast_as(None, x):
        return _by_rows(node, lambda part: torch.softmax(part, node.dim, dtype=node.dtypes[1]), x)


def _gradient(node: Node, dy: Tensor, kept: Tensor) -> Tensor:
    y = torch.softmax(kept, node.dim, dtype=dy.dtype) if _widens(node) else kept
    dx: Tensor = torch.ops.aten._softmax_backward_data(dy, y, node.dim, y.dtype)
    return dx.to(node.dtypes[0])


def _by_rows(node: Node, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """`function` of tensors of one shape, by parts if a wide intermediate of full size would be needed."""
    in_parts = node.dim == -1 and _widens(node) and not is_batched(tensors)
    return elementwise(function, *tensors) if in_parts else function(*tensors)
