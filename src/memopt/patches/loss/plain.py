"""The cross-entropy of a plain linear, x W^T + b, in two ways; `Plain` is what they share, and says which one is taken.

At once, by chunks of rows: three products, or two for a frozen head.

    y = x_chunk W^T + b,  z = ops(y)         loss += sum of the chunk's losses,  dz over z
    dx_chunk = dy W,  dW += dy^T x_chunk,  db += sum over rows of dy             saves dx, dW and db, and no x

For a loss that is one number, of which the backward is a scale. On a GPU one kernel reads z for both loss and dz. W's
gradient is summed in fp32 at least, but for a sum of two chunks on a GPU (`SUMMED`). That gradient is then kept until
backward, which scales it into another, a sum of many chunks in 16 bits needs one of fp32, and chunks of few rows waste
the products. By blocks of columns, a part of the vocabulary for all rows at a time, none of this is so:

    z = ops(x W_block^T + b_block)         elementwise, so that a block needs its own columns only
    forward     statistics of each row, block after block;  saves x and the statistics
    backward    z again, dz from the statistics;  dx += dz W_block,  dW_block = dz^T x,  db_block = sum over rows of dz

Four products instead of three, and no memory but a block, dx in fp32 and the gradients themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from memopt.kernels.base.autograd import (
    DirectFunction,
    autocast_as,
    batched_gradients,
    is_batched,
    refuse_double_backward,
)
from memopt.kernels.base.pieces import pieces
from memopt.kernels.base.precision import accumulation_dtype
from memopt.kernels.loss.function import (
    block_gradient_,
    fresh_statistics,
    in_range,
    row_factors,
    row_losses,
    statistics_,
)
from memopt.kernels.loss.reference import LossArguments, losses_of
from memopt.patches.loss.rows import chunk_bytes, in_tiles, is_on_gpu, itself
from memopt.patches.loss.source import Source, as_leaf, distinct, run

#: Rows of a chunk with which a product is not bound by reading W.
ROWS = 256
#: Columns of a block, at least.
COLUMNS = 256
#: Chunks whose products are summed up in the dtype of a 16-bit gradient: each but the first rounds it once more.
SUMMED = 2


@dataclass(frozen=True, eq=False)
class Plain:
    """A cross-entropy over the logits of a plain linear."""

    source: Source
    """(rows, V)."""
    arguments: LossArguments

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """x, weight and bias, and what operations read: in the graph as far as the logits are."""
        parameters = self.source.head.module._parameters
        others = distinct(tensor for operation in self.source.operations for tensor in operation.tensors)
        tensors = (self.source.x, parameters["weight"], parameters.get("bias"), *others)
        if self.source.tracked and torch.is_grad_enabled():
            return tensors
        return tuple(None if tensor is None else tensor.detach() for tensor in tensors)

    def room(self, x: Tensor) -> int:
        """Bytes that the logits of a chunk of the rows `x` may take, beside the gradients of x and of the weight."""
        count, room = len(self.source.operations), max(chunk_bytes(x), self.source.head.room)
        # Operations hold a result each, and there is a gradient of the first and of the last.
        return max(min(x.nbytes, room), room // (3 + count)) if count and is_on_gpu(x) else room

    @property
    def is_at_once(self) -> bool:
        """Whether gradients are made in the forward, of a loss that is one number.

        The loss is to take no more than one more activation, or its room: a chunk of enough rows is no larger, nor is
        the sum that W's gradient needs beside itself. On a GPU nor is that gradient, of which backward makes another.
        """
        x, weight = self.source.x, self.source.head.module._parameters["weight"]
        assert weight is not None
        dtype = self.source.head.autocast or x.dtype
        if dtype == torch.float16 or not any(each is not None and each.requires_grad for each in self.tensors):
            return False  # gradients made in the forward would be too small for it: the loss is not scaled yet
        room = self.room(x)
        fits = min(len(x), ROWS) * self.source.width * dtype.itemsize <= room
        if not weight.requires_grad:
            return fits
        in_sum = self.sum_dtype(weight) != weight.dtype
        kept = weight.nbytes if is_on_gpu(x) else 0
        return fits and kept <= room and (not in_sum or 4 * weight.numel() <= room)

    def sum_dtype(self, weight: Tensor) -> torch.dtype:
        """In which the chunks' parts of the weight's gradient are summed up."""
        x = self.source.x
        few = is_on_gpu(x) and len(x) <= SUMMED * self.chunk_rows(x)
        return weight.dtype if few else accumulation_dtype(weight.dtype)

    def chunk_rows(self, x: Tensor) -> int:
        """How many of the rows `x` are a chunk."""
        itemsize = (self.source.head.autocast or x.dtype).itemsize
        return max(1, min(len(x), max(ROWS, in_tiles(self.room(x) // (self.source.width * itemsize)))))

    def rows(self, x: Tensor) -> Tensor:
        """`x` in the dtype of the product."""
        return x.to(self.source.head.autocast or x.dtype)

    def chunks(self, rows: Tensor) -> Iterator[slice]:
        """Slices of the rows."""
        return _slices(len(rows), self.chunk_rows(rows), rows)

    def blocks(self, rows: Tensor) -> Iterator[slice]:
        """Slices of the columns."""
        room = self.room(rows)
        room = max(min(room, chunk_bytes(rows)), room - rows.nbytes)  # the sum of dx lies beside a block
        columns = room // (rows.element_size() * max(1, len(rows)))
        return _slices(self.source.width, max(COLUMNS, in_tiles(columns)), rows)

    def matrix(self, weight: Tensor, columns: slice) -> Tensor:
        """(columns, in), in the dtype of the product."""
        block = weight[:, columns].t() if self.source.head.transposed else weight[columns]
        return block.to(self.source.head.autocast or weight.dtype)

    def logits(self, rows: Tensor, matrix: Tensor, bias: Tensor | None, columns: slice) -> Tensor:
        """Of the head itself: (rows, columns)."""
        return F.linear(rows, matrix, None if bias is None else bias[columns].to(matrix.dtype))

    def gradient(
        self, rows: Tensor, matrix: Tensor, bias: Tensor | None, columns: slice,
        write: Callable[..., object], sums: Sequence[Tensor | None],
    ) -> Tensor:  # fmt: skip
        """The gradient (rows, columns) of :meth:`logits`; to `sums` those of what operations read are added.

        Args:
            write: ``write(z, out=...)`` writes the gradient of what the logits became there.
        """
        y = self.logits(rows, matrix, bias, columns)
        if not self.source.operations:
            write(y, out=y)
            return y
        cut = self.source.cut
        read = distinct(t for operation in cut.operations for t in operation.tensors)
        wanted = [t for t, total in zip(read, sums, strict=True) if total is not None]
        # Whoever watches saved tensors outside (checkpointing, offloading) has to see none of a chunk.
        with torch.enable_grad(), saved_tensors_hooks(itself, itself):
            z = run(cut.operations, y.requires_grad_(), columns)
        write(z.detach(), out=(dz := torch.empty_like(z)))  # not over it: an operation may have saved its result
        dy, *found = torch.autograd.grad(z, (y, *wanted), dz, allow_unused=True)
        for total, gradient in zip((each for each in sums if each is not None), found, strict=True):
            total += 0 if gradient is None else gradient
        return dy

    def into(self, dweight: Tensor, columns: slice) -> Tensor:
        """The part (columns, in) of a gradient of the weight."""
        return dweight[:, columns].t() if self.source.head.transposed else dweight[columns]


def is_plain(source: Source) -> bool:
    """Whether the head is a plain linear and nothing since has mixed columns."""
    return source.head.transposed is not None and all(operation.by_column for operation in source.operations)


def _slices(count: int, step: int, rows: Tensor) -> Iterator[slice]:
    return pieces((slice(first, min(first + step, count)) for first in range(0, count, step)), rows)


def add_product_(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """Add ``a @ b`` to `total`, or write it there where it is the `first`: rounded once, without a temporary."""
    wide: Any = {}
    if a.dtype != total.dtype and total.dtype == torch.float32 and is_on_gpu(a):
        wide = {"out_dtype": total.dtype}
    elif a.dtype != total.dtype:
        a, b = a.to(total.dtype), b.to(total.dtype)
    if first:
        torch.mm(a, b, **wide, out=total)
    else:
        torch.addmm(total, a, b, **wide, out=total)


def sums_of(tensors: Any, needed: Any) -> list[Tensor | None]:
    """A sum for the gradient of each tensor that needs one."""
    return [
        torch.zeros_like(tensor, dtype=accumulation_dtype(tensor.dtype)) if need else None
        for tensor, need in zip(tensors, needed, strict=True)
    ]


# -- at once ----------------------------------------------------------------------------------------------------------


def loss_at_once(plain: Plain, target: Tensor, factor: Tensor) -> Tensor:
    """`factor` times the sum of the losses of all rows, in fp32, or fp64 for fp64 logits.

    Args:
        target: (rows,) int64.
        factor: of one element: 1 for a sum.
    """
    plain.source.check()
    x, weight, *others = plain.tensors
    # A node each, that of W the last: its backward runs first, and lets go of what it saved before the others run.
    tensors = (x, *others, weight)
    with torch.no_grad(), autocast_as(None, plain.source.x):
        loss, gradients = _computed(plain, target, factor, tensors)
    for tensor, gradient in zip(tensors, gradients, strict=True):
        if tensor is not None and gradient is not None:
            loss = _WithGradient.apply(loss, tensor, gradient.to(tensor.dtype))
    return loss


class _WithGradient(DirectFunction):
    """A number, of which one more tensor has a gradient that is known."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, tensor: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return loss.data  # not a view: a user's program may add to the loss in place

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        (gradient,) = ctx.saved_tensors
        return dloss, gradient * dloss, None


def _computed(
    plain: Plain, target: Tensor, factor: Tensor, tensors: Sequence[Tensor | None]
) -> tuple[Tensor, Sequence[Tensor | None]]:
    """The loss, and the gradient of each of `tensors` that needs one."""
    x, *_, weight = tensors
    assert x is not None
    assert weight is not None
    arguments, every = plain.arguments, slice(0, plain.source.width)
    needed = [tensor is not None and tensor.requires_grad for tensor in tensors]
    in_range(target, arguments.ignore_index, every.stop)
    rows, matrix = plain.rows(x), plain.matrix(weight, every)
    statistics = fresh_statistics(rows)
    factors = row_factors(target, factor.to(statistics.dtype).expand(len(rows)), arguments, every.stop)
    options: Any = {"weight": arguments.weight, "smoothed": bool(arguments.label_smoothing)}
    empty = torch.empty_like if len(rows) else torch.zeros_like
    dx = empty(rows) if needed[0] else None
    dweight = empty(weight, dtype=plain.sum_dtype(weight)) if needed[-1] else None
    sums = sums_of(tensors[1:-1], needed[1:-1])
    for part in plain.chunks(rows):
        write = partial(statistics_, statistics=statistics[part], target=target[part], factors=factors[part], **options)
        dy = plain.gradient(rows[part], matrix, tensors[1], every, write, sums[1:])
        if dx is not None:
            torch.mm(dy, matrix, out=dx[part])
        if dweight is not None:
            add_product_(plain.into(dweight, every), dy.t(), rows[part], first=not part.start)
        if sums[0] is not None:
            sums[0] += dy.sum(0, dtype=sums[0].dtype)
        del dy  # before the next is computed
    losses, _ = row_losses(statistics, target, arguments, every.stop)
    return losses.sum() * factor, (dx, *sums, dweight)


# -- by blocks --------------------------------------------------------------------------------------------------------


def losses_by_blocks(plain: Plain, target: Tensor) -> Tensor:
    """The losses of all rows, not reduced: (rows,) in fp32, or fp64 for fp64 logits; 0 where the target is ignored.

    Args:
        target: (rows,) int64.
    """
    plain.source.check()
    losses: Tensor = _BlocksFunction.apply(plain, target, plain.arguments.weight, *plain.tensors)
    return losses


class _BlocksFunction(DirectFunction):
    @staticmethod
    def forward(
        ctx: Any, plain: Plain, target: Tensor, class_weight: Tensor | None,
        x: Tensor, weight: Tensor, bias: Tensor | None, *others: Tensor,
    ) -> Tensor:  # fmt: skip
        rows, arguments, width = plain.rows(x), plain.arguments, plain.source.width
        in_range(target, arguments.ignore_index, width)
        statistics, smoothed = fresh_statistics(rows), bool(arguments.label_smoothing)
        with autocast_as(None, rows):
            for columns in plain.blocks(rows):
                matrix = plain.matrix(weight, columns)
                z = run(plain.source.operations, plain.logits(rows, matrix, bias, columns), columns)
                del matrix
                of_block = None if class_weight is None else class_weight[columns]
                statistics_(z, statistics, target - columns.start, weight=of_block, smoothed=smoothed)
                del z  # before the next is computed
        losses, lse = row_losses(statistics, target, arguments, width)
        ctx.plain = replace(plain, source=plain.source.without_rows)
        ctx.save_for_backward(target, class_weight, lse, x, weight, bias, *others)
        return losses

    @staticmethod
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        plain: Plain = ctx.plain
        plain.source.check()
        target, class_weight, lse, x, weight, bias, *others = ctx.saved_tensors
        if is_batched((dlosses,)):
            cut = plain.source.cut
            with torch.enable_grad(), saved_tensors_hooks(itself, itself):
                leaf = as_leaf(x)
                losses = losses_of(cut.values(leaf), target, plain.arguments)
                inputs = (leaf, *replace(plain, source=cut).tensors[1:])
            return None, None, None, *batched_gradients((losses,), inputs, (dlosses,))
        rows, factors = plain.rows(x), row_factors(target, dlosses, plain.arguments, plain.source.width)
        needs_x, needs_weight, needs_bias, *needs_others = ctx.needs_input_grad[3:]
        dx = (torch.empty_like if len(rows) else torch.zeros_like)(rows, dtype=lse.dtype) if needs_x else None
        dweight = torch.empty_like(weight) if needs_weight else None
        dbias = torch.empty_like(bias) if needs_bias else None
        dothers = sums_of(others, needs_others)
        with autocast_as(None, rows):
            for columns in plain.blocks(rows):
                write = partial(
                    block_gradient_, target=target - columns.start, lse=lse, factors=factors,
                    weight=None if class_weight is None else class_weight[columns],
                )  # fmt: skip
                matrix = plain.matrix(weight, columns)
                dy = plain.gradient(rows, matrix, bias, columns, write, dothers)
                if dx is not None:
                    add_product_(dx, dy, matrix, first=not columns.start)
                if dweight is not None:
                    add_product_(plain.into(dweight, columns), dy.t(), rows, first=True)
                if dbias is not None:
                    dbias[columns] = dy.sum(0, dtype=accumulation_dtype(dy.dtype))
                del dy, matrix  # before the next are computed
        done = (None if total is None else total.to(other.dtype) for total, other in zip(dothers, others, strict=True))
        return None, None, None, None if dx is None else dx.to(x.dtype), dweight, dbias, *done
