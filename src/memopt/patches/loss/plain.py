"""The cross-entropy of a plain linear, x W^T + b: code shared by its two algorithms, and the choice between them.

By chunks of rows, the forward computes the gradients, in three products, or two for a frozen head. This keeps a
gradient of W until backward, which makes a scaled copy; many chunks in 16 bits need a sum in fp32; and products of few
rows are slow. By blocks of columns there is none of these costs, but the logits are computed twice: one product more.
Both are in `losses.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt.kernels.base.autograd import accumulation_dtype
from memopt.kernels.base.pieces import pieces
from memopt.kernels.loss.reference import LossArguments
from memopt.patches.loss.rows import chunk_bytes, in_tiles, is_on_gpu
from memopt.patches.loss.source import Source, distinct, run
from memopt.torch_compat import without_foreign_hooks

#: Least rows of a chunk: a product of so many is not bound by reading W.
ROWS = 256
#: Least columns of a block.
COLUMNS = 256
#: On a GPU, up to so many chunks are summed in the dtype of a 16-bit gradient; each but the first rounds it once more.
SUMMED = 2


@dataclass(frozen=True, eq=False)
class Plain:
    """A cross-entropy over the logits of a plain linear."""

    source: Source
    """The source of the logits (rows, V)."""
    arguments: LossArguments

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """x, weight, bias and the tensors that operations read; detached if the logits have no graph."""
        parameters = self.source.head.module._parameters
        others = distinct(tensor for operation in self.source.operations for tensor in operation.tensors)
        tensors = (self.source.x, parameters["weight"], parameters.get("bias"), *others)
        if self.source.tracked and torch.is_grad_enabled():
            return tensors
        return tuple(None if tensor is None else tensor.detach() for tensor in tensors)

    def room(self, x: Tensor) -> int:
        """Bytes that the logits of a chunk of the rows `x` may take, beside the gradients of x and of the weight."""
        count, room = len(self.source.operations), max(chunk_bytes(x), self.source.head.room)
        # Each operation holds a result; the gradients of the first and of the last result are alive with them.
        return max(min(x.nbytes, room), room // (3 + count)) if count and is_on_gpu(x) else room

    @property
    def is_at_once(self) -> bool:
        """Whether the forward computes the gradients (`loss_at_once`), for a loss that is one number. The :meth:`room`
        must suffice for a chunk of `ROWS` rows; for the fp32 sum of W's gradient, if it needs one; and on a GPU for W's
        gradient itself, of which backward makes a scaled copy."""
        x, weight = self.source.x, self.source.head.module._parameters["weight"]
        assert weight is not None
        dtype = self.source.head.autocast or x.dtype
        if dtype == torch.float16 or not any(each is not None and each.requires_grad for each in self.tensors):
            return False  # fp16 gradients made in the forward would underflow: the loss is not scaled yet
        room = self.room(x)
        fits = min(len(x), ROWS) * self.source.width * dtype.itemsize <= room
        if not weight.requires_grad:
            return fits
        in_sum = self.sum_dtype(weight) != weight.dtype
        kept = weight.nbytes if is_on_gpu(x) else 0
        return fits and kept <= room and (not in_sum or 4 * weight.numel() <= room)

    def sum_dtype(self, weight: Tensor) -> torch.dtype:
        """The dtype in which the chunks' parts of the weight's gradient are summed."""
        x = self.source.x
        few = is_on_gpu(x) and len(x) <= SUMMED * self.chunk_rows(x)
        return weight.dtype if few else accumulation_dtype(weight.dtype)

    def chunk_rows(self, x: Tensor) -> int:
        """The number of rows in a chunk of `x`."""
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
        room = max(min(room, chunk_bytes(rows)), room - rows.nbytes)  # dx is alive beside a block
        columns = room // (rows.element_size() * max(1, len(rows)))
        return _slices(self.source.width, max(COLUMNS, in_tiles(columns)), rows)

    def matrix(self, weight: Tensor, columns: slice) -> Tensor:
        """The weight's part (columns, in) for these columns of the logits, in the dtype of the product."""
        block = weight[:, columns].t() if self.source.head.transposed else weight[columns]
        return block.to(self.source.head.autocast or weight.dtype)

    def logits(self, rows: Tensor, matrix: Tensor, bias: Tensor | None, columns: slice) -> Tensor:
        """The logits (rows, columns) of the head, before all operations."""
        return F.linear(rows, matrix, None if bias is None else bias[columns].to(matrix.dtype))

    def gradient(
        self, rows: Tensor, matrix: Tensor, bias: Tensor | None, columns: slice,
        write: Callable[..., object], sums: Sequence[Tensor | None],
    ) -> Tensor:  # fmt: skip
        """The gradient (rows, columns) of :meth:`logits`; ``write(z, out=...)`` writes that of z, the logits after all
        operations. Adds gradients of the operations' tensors to `sums`."""
        y = self.logits(rows, matrix, bias, columns)
        if not self.source.operations:
            write(y, out=y)
            return y
        cut = self.source.cut
        read = distinct(t for operation in cut.operations for t in operation.tensors)
        wanted = [t for t, total in zip(read, sums, strict=True) if total is not None]
        # Foreign saved-tensor hooks (checkpointing, offloading) must not get the saved tensors of a chunk.
        with torch.enable_grad(), without_foreign_hooks():
            z = run(cut.operations, y.requires_grad_(), columns)
        write(z.detach(), out=(dz := torch.empty_like(z)))  # not over z: an operation may have saved its result
        dy, *found = torch.autograd.grad(z, (y, *wanted), dz, allow_unused=True)
        for total, gradient in zip((each for each in sums if each is not None), found, strict=True):
            total += 0 if gradient is None else gradient
        return dy

    def into(self, dweight: Tensor, columns: slice) -> Tensor:
        """A view (columns, in) of the weight's gradient, for these columns of the logits."""
        return dweight[:, columns].t() if self.source.head.transposed else dweight[columns]


def is_plain(source: Source) -> bool:
    """Whether the head is a plain linear and no operation on its logits mixes columns."""
    return source.head.transposed is not None and all(operation.by_column for operation in source.operations)


def _slices(count: int, step: int, rows: Tensor) -> Iterator[slice]:
    return pieces((slice(first, min(first + step, count)) for first in range(0, count, step)), rows)


def add_product_(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """``total += a @ b``, or ``total = a @ b`` if it is the `first`: rounded once, without a temporary product."""
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
    """Zeros to sum the gradient of each tensor that needs one; None for the others."""
    return [
        torch.zeros_like(tensor, dtype=accumulation_dtype(tensor.dtype)) if need else None
        for tensor, need in zip(tensors, needed, strict=True)
    ]
