"""A frozen linear and its low-rank adapter as one function, and the adapter of a quantised linear as one.

    forward     y = x W^T + b + s (x A^T) B^T
    backward    dt = s dy,   dB = dt^T h,   dh = dt B,   dA = dh^T x,   dx = dh A + dy W         h = x A^T

Saved are the parameters themselves, h, and x or the tensors that recompute x (`memopt.recompute.specs`), none of them
as a copy in another dtype. Every step is computed and rounded as in three separate linears, with the casts of autocast
and PEFT, so value and gradients equal theirs to the bit. One exception: under autocast on a GPU dA and dB have one
rounding less (`weight_gradient`). Source: LoRA, arXiv 2106.09685.

In blocks that run again, large tensors in the adapter's dtype (fp32 around a 16-bit linear) are made by pieces that fit
into a GPU's cache; no sum is split. If the gradient of x takes several pieces, this function adds its two terms: with
other readers of x, gradients are then summed in another order than in the stock model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt.kernels.base.autograd import autocast_dtype, refuse_double_backward, without_autocast
from memopt.kernels.base.pieces import pieces
from memopt.kernels.linear.function import computed, input_gradient, is_plain, to_be_computed, weight_gradient
from memopt.recompute.specs import RecomputeSpec, is_under_foreign_hooks, shared_cast, spec_of
from memopt.torch_compat import DirectFunction, is_selectively_checkpointed, is_transformed

#: Bytes of a piece; most pieces; and a tile of a product, of which the rows or columns of a piece are a multiple.
PIECE, PIECES, TILE = 3 * 2**22, 12, 128


def adapted_linear(
    x: object, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float
) -> Tensor | None:
    """``F.linear(x, weight, bias) + F.linear(F.linear(x.to(a.dtype), a), b) * scaling`` in the dtype of the first term.

    Args:
        x: (..., in), floating point.
        weight, bias: (out, in) and (out,) or None.
        a, b: (r, in) and (out, r).

    Returns:
        y: (..., out); None if the linears have to run on their own: if weight or bias is trained, or if types or
        dtypes are not those of a plain adapter.
    """
    if not isinstance(x, Tensor) or not (is_plain(x) and is_plain(weight) and is_plain(a) and is_plain(b)):
        return None
    if weight.requires_grad or not (a.requires_grad or b.requires_grad) or a.dtype is not b.dtype:
        return None
    if bias is not None and (bias.requires_grad or bias.dtype is not weight.dtype):
        return None
    if not x.is_floating_point() or x.layout is not torch.strided or x.is_nested or is_transformed(x):
        return None
    x = shared_cast(x, autocast_dtype)
    dtype = autocast_dtype(x)
    of_adapter = dtype or a.dtype
    if dtype is None:
        dtype = weight.dtype
        if x.dtype is not dtype:
            return None
    elif x.dtype not in (torch.float32, dtype) or a.dtype not in (torch.float32, dtype):
        return None  # autocast leaves fp64 as it is, and two casts may round twice
    spec, given = spec_of(x), x
    if spec is None:
        narrows = of_adapter.itemsize < x.dtype.itemsize
        # Left to the stock linears: a small view (a scope copies it only if no autograd function saves it), and a leaf
        # (autocast casts it once for all readers). Not in checkpointing, whose second run makes the inputs leaves.
        is_left = x.untyped_storage().nbytes() != x.nbytes or (narrows and x.is_leaf and x.requires_grad)
        if is_left and not is_under_foreign_hooks():
            return None
        if narrows:
            x, given = x.to(dtype), x.to(of_adapter)  # in the graph, so that a scope can follow it; in this order
    y: Tensor = AdaptedLinearFunction.apply(given, x, weight, bias, a, b, scaling, (dtype, of_adapter), spec)
    return computed(y, lambda h: _sum(_matrix(x).to(dtype), weight, bias, h, b, scaling, PIECE).view(y.shape))


def added_adapter(
    linear: Callable[[Tensor], Tensor], x: object, a: Tensor, b: Tensor, scaling: float, *, rounds: bool
) -> Tensor | None:
    """``linear(x) + F.linear(F.linear(x.to(a.dtype), a), b) * scaling`` in the dtype of the first term.

    Args:
        linear: returns (..., out).
        x: (..., in), floating point.
        a, b: (r, in) and (out, r).
        rounds: whether the adapter's term is rounded to that dtype before it is added.

    Returns:
        The sum; None if the linears have to run on their own (`linear` was not called then).
    """
    if not isinstance(x, Tensor) or not all(map(is_plain, (x, a, b))) or a.dtype is not b.dtype:
        return None
    if not x.is_floating_point() or not (a.requires_grad or b.requires_grad) or is_transformed(x):
        return None
    dtype = autocast_dtype(x)
    if dtype is not None and not {x.dtype, a.dtype} <= {torch.float32, dtype}:
        return None
    spec = spec_of(x)
    if spec is None and x.untyped_storage().nbytes() != x.nbytes and not is_under_foreign_hooks():
        return None  # a scope copies a small view out of its storage only if no autograd function saves it
    y = linear(x)
    if not is_plain(y) or (dtype is not None and dtype is not y.dtype):
        term = F.linear(F.linear(x if dtype else x.to(a.dtype), a), b) * scaling
        return y + term if dtype else (y + (term.to(y.dtype) if rounds else term)).to(y.dtype)
    if y._base is not None or y._version or not y.is_contiguous():
        y = y.clone(memory_format=torch.contiguous_format)  # the term is added in place
    z: Tensor = AddedAdapterFunction.apply(x, y, a, b, scaling, dtype or a.dtype, rounds, spec)
    return z


def piece_bytes() -> int:
    """Bytes of a piece in blocks that run again; no limit in other blocks, since pieces cost kernel launches."""
    return PIECE if is_under_foreign_hooks() else sys.maxsize


class AdaptedLinearFunction(DirectFunction):
    """Takes its input as two arguments, so that autograd sums their gradients in the order of two linears."""

    __memopt_saves__ = "linear input"

    @staticmethod
    def forward(
        ctx: Any, given: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float,
        dtypes: tuple[torch.dtype, torch.dtype], spec: RecomputeSpec | None,
    ) -> Tensor:  # fmt: skip
        """`given` is `x` for the adapter, perhaps cast; `dtypes` are the dtypes of the linear and of the adapter."""
        dtype, of_adapter = dtypes
        ctx.scaling, ctx.shape, ctx.dtypes, ctx.input = scaling, x.shape, (given.dtype, of_adapter), None
        ctx.is_shared, ctx.piece = given is x, piece_bytes()
        saved: Sequence[Tensor | None] = (given,)
        if not a.requires_grad:
            saved = (None,)
        elif spec is not None:
            ctx.input, saved = spec.recomputed, spec.take()
        rows, matrix = _matrix(x).to(dtype), a.to(of_adapter)
        read = rows if ctx.is_shared or dtype is of_adapter else given.reshape(rows.shape)
        h = _pieced(lambda rows: F.linear(rows, matrix), read, (0, 0), of_adapter, ctx.piece)
        ctx.save_for_backward(weight if ctx.needs_input_grad[1] else None, a, b, h if b.requires_grad else None, *saved)
        shape = *x.shape[:-1], weight.size(0)
        y = to_be_computed(ctx, h, shape, dtype)
        return _sum(rows, weight, bias, h, b, scaling, ctx.piece).view(shape).data if y is None else y

    @staticmethod
    @without_autocast
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        weight, a, b, h, *saved = ctx.saved_tensors
        needs_given, needs_x, _, _, needs_a, needs_b, *_ = ctx.needs_input_grad
        (_, dtype), piece = ctx.dtypes, ctx.piece
        given = dx = None
        rows = dy.reshape(-1, dy.size(-1))
        dh, da, db = _of_adapter(ctx, rows, a, b, h, saved, (needs_given, needs_a, needs_b))
        if needs_x:
            dx = input_gradient(rows, weight, ctx.shape)
        if needs_given:
            nbytes = ctx.shape.numel() * (dtype.itemsize + dy.itemsize)
            if dx is None or not ctx.is_shared or nbytes <= piece:
                given = input_gradient(dh, a, ctx.shape)
            else:
                matrix, sums = a.to(dtype), dx.view(-1, dx.size(-1))
                for part in _slices(len(sums), nbytes, sums, piece):
                    sums[part].add_(dh[part].mm(matrix).to(sums.dtype))
        return given, dx, None, None, da, db, None, None, None


class AddedAdapterFunction(DirectFunction):
    """Adds the adapter's term in place to the output of a linear of any kind."""

    __memopt_saves__ = "linear input"

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, a: Tensor, b: Tensor, scaling: float, of_adapter: torch.dtype, rounds: bool,
        spec: RecomputeSpec | None,
    ) -> Tensor:  # fmt: skip
        ctx.scaling, ctx.shape, ctx.dtypes, ctx.input = scaling, x.shape, (x.dtype, of_adapter), None
        ctx.piece = piece_bytes()
        saved: Sequence[Tensor | None] = (x if a.requires_grad else None,)
        if a.requires_grad and spec is not None:
            ctx.input, saved = spec.recomputed, spec.take()
        matrix = a.to(of_adapter)
        h = _pieced(lambda rows: F.linear(rows, matrix), _matrix(x), (0, 0), of_adapter, ctx.piece)
        ctx.save_for_backward(a, b, h if b.requires_grad else None, *saved)
        ctx.mark_dirty(y)
        _add(_matrix(y), h, b, scaling, ctx.piece, rounds=rounds)
        return y

    @staticmethod
    @without_autocast
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        a, b, h, *saved = ctx.saved_tensors
        needs_x, needs_y, needs_a, needs_b, *_ = ctx.needs_input_grad
        (own, dtype), piece = ctx.dtypes, ctx.piece
        dh, da, db = _of_adapter(ctx, dy.reshape(-1, dy.size(-1)), a, b, h, saved, (needs_x, needs_a, needs_b))
        dx = None
        if needs_x:
            matrix, dx = a.to(dtype), dy.new_empty(ctx.shape, dtype=own)
            rows = _matrix(dx)
            for part in _slices(len(rows), dx.numel() * dtype.itemsize, rows, piece):
                rows[part] = dh[part].mm(matrix)
        return dx, dy if needs_y else None, da, db, None, None, None, None


def _of_adapter(
    ctx: Any, rows: Tensor, a: Tensor, b: Tensor, h: Tensor, saved: Sequence[Tensor], needs: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dh, dA and dB from `rows`, the gradient of the sum as a matrix; dh only if dA or the input's is needed."""
    (needs_x, needs_a, needs_b), scaling, (_, dtype), piece = needs, ctx.scaling, ctx.dtypes, ctx.piece
    added, dh, da, db = rows, rows, None, None
    if rows.numel() * dtype.itemsize <= piece:
        added, scaling = _scaled(rows, dtype, scaling), 1
    if needs_b:
        db = _pieced(lambda added: weight_gradient(added, h, b), added, (1, 0), dtype, piece, scaling)
    if needs_a or needs_x:
        matrix = b.to(dtype)
        dh = _pieced(lambda added: added.mm(matrix), added, (0, 0), dtype, piece, scaling)
        del added
        if needs_a:
            da = _pieced(lambda x: weight_gradient(dh, x, a), _rows(ctx, saved), (1, 1), dtype, piece)
    return dh, da, db


def _rows(ctx: Any, saved: Sequence[Tensor]) -> Tensor:
    """x as a matrix; if x is small, in the adapter's dtype, a cast that all its readers share."""
    own, dtype = ctx.dtypes
    own = dtype if ctx.shape.numel() * dtype.itemsize <= ctx.piece else own
    x: Tensor = saved[0] if ctx.input is None else ctx.input.rows(saved, own)
    return _matrix(x)


def _matrix(x: Tensor) -> Tensor:
    return x.reshape(-1, x.size(-1))


def _sum(rows: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor, b: Tensor, scaling: float, piece: int) -> Tensor:
    """``F.linear(rows, weight, bias) + h B^T * scaling`` of matrices, in the dtype of `rows`."""
    y = F.linear(rows, weight.to(rows.dtype), None if bias is None else bias.to(rows.dtype))
    if is_selectively_checkpointed():  # it may have saved the product: do not add in place
        return (y + _scaled(F.linear(h, b.to(h.dtype)), h.dtype, scaling)).to(y.dtype)
    _add(y, h, b, scaling, piece)
    return y


def _add(y: Tensor, h: Tensor, b: Tensor, scaling: float, piece: int, *, rounds: bool = False) -> None:
    """Add ``h B^T * scaling`` to the matrix `y`."""
    matrix = b.to(h.dtype)
    for part in _slices(len(y), y.numel() * h.itemsize, y, piece):
        term = _scaled(F.linear(h[part], matrix), h.dtype, scaling)
        y[part].add_(term.to(y.dtype) if rounds else term)


def _scaled(x: Tensor, dtype: torch.dtype, scaling: float) -> Tensor:
    return x.to(dtype) if scaling == 1 else x.to(dtype) * scaling


def _pieced(
    of: Callable[[Tensor], Tensor], x: Tensor, dims: tuple[int, int], dtype: torch.dtype, piece: int, scaling: float = 1
) -> Tensor:
    """``of(x.to(dtype) * scaling)``, by pieces along dimension dims[0] of the matrix `x`, dims[1] of the result."""
    if x.dtype is dtype and scaling == 1:
        return of(x)
    (of_x, of_result), whole = dims, None
    for columns in _slices(x.size(of_x), x.numel() * dtype.itemsize, x, piece):
        part = of(_scaled(x[columns] if of_x == 0 else x[:, columns], dtype, scaling))
        if part.size(of_result) == x.size(of_x):
            return part
        if whole is None:
            whole = part.new_empty([x.size(of_x) if dim == of_result else part.size(dim) for dim in range(2)])
        whole.narrow(of_result, columns.start, part.size(of_result)).copy_(part)
    assert whole is not None
    return whole


def _slices(count: int, nbytes: int, tensor: Tensor, piece: int) -> Iterable[slice]:
    """Slices of `count` rows or columns, which take `nbytes` in all: at most `PIECES`, of about `piece` bytes."""
    if nbytes <= piece:
        return (slice(None),)
    size = -(-max(piece * count // nbytes, -(-count // PIECES)) // TILE) * TILE
    return pieces((slice(first, first + size) for first in range(0, count, size)), tensor)
