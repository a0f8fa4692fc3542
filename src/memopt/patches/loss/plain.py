"""The cross-entropy of a plain linear, x W^T + b: what its two ways share, and which one is taken.

By chunks of rows (`at_once.py`) the gradients are made in the forward, by three products, or two for a frozen head. A
gradient of W is then kept until backward, which scales it into another, a sum of many chunks in 16 bits needs one of
fp32, and chunks of few rows waste the products. By blocks of columns (`blocks.py`) none of this is so, and the logits
are computed twice: one product more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from memopt.kernels.base.pieces import pieces
from memopt.kernels.base.precision import accumulation_dtype
from memopt.kernels.loss.reference import LossArguments
from memopt.patches.loss.rows import chunk_bytes, in_tiles, is_on_gpu, itself
from memopt.patches.loss.source import Source, distinct

#: Rows of a chunk with which a product is not bound by reading W.
ROWS = 256
#: Columns of a block, at least.
COLUMNS = 256
#: Chunks whose products are summed up in the dtype of a 16-bit gradient: each but the first rounds it once more.
SUMMED = 2


@dataclass(frozen=True)
class LossPlan:
    """How the loss of a plain linear is computed; data, which can be printed."""

    at_once: bool
    rows: int
    """Of a chunk."""
    columns: int
    products: int
    """Of all rows, columns and inputs, forward and backward."""
    nbytes: int
    """The most that lives beside the gradients of x and of the weight; bytes of a few numbers a row left out."""


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

    @property
    def room(self) -> int:
        """Bytes that it may take beside the gradients of x and of the weight."""
        return max(chunk_bytes(self.source.x), self.source.head.room)

    @property
    def is_at_once(self) -> bool:
        """Whether gradients are made in the forward, of a loss that is one number.

        The loss is to take no more than one more activation, or its room: a chunk of enough rows is no larger, nor is
        the sum that W's gradient needs beside itself. On a GPU nor is that gradient, of which backward makes another.
        """
        x, weight = self.source.x, self.source.head.module._parameters["weight"]
        assert weight is not None
        dtype = self.source.head.autocast or x.dtype
        if dtype == torch.float16:
            return False  # gradients made in the forward would be too small for it: the loss is not scaled yet
        fits = min(len(x), ROWS) * self.source.width * dtype.itemsize <= self.room
        if not weight.requires_grad:
            return fits
        in_sum = self.sum_dtype(weight) != weight.dtype
        kept = weight.nbytes if is_on_gpu(x) else 0
        return fits and kept <= self.room and (not in_sum or 4 * weight.numel() <= self.room)

    @property
    def plan(self) -> LossPlan:
        """What is taken for a loss that is one number."""
        x, weight = self.source.x, self.source.head.module._parameters["weight"]
        assert weight is not None
        trained, dtype = weight.requires_grad, self.source.head.autocast or x.dtype
        count, of_x, of_dx = len(x), x.nbytes, x.numel() * accumulation_dtype(dtype).itemsize
        if not self.is_at_once:
            columns = self.columns(count, dtype.itemsize)
            block = count * columns * dtype.itemsize
            return LossPlan(False, count, columns, 3 + trained, max(block + of_dx - of_x, of_dx))
        rows = self.chunk_rows(count, dtype.itemsize)
        chunk = rows * self.source.width * dtype.itemsize
        chunk += weight.numel() * dtype.itemsize if dtype != weight.dtype else 0
        chunk += (self.sum_dtype(weight).itemsize - weight.itemsize) * weight.numel() if trained else 0
        return LossPlan(True, rows, self.source.width, 2 + trained, max(chunk, of_x, weight.nbytes if trained else 0))

    def sum_dtype(self, weight: Tensor) -> torch.dtype:
        """In which the chunks' parts of the weight's gradient are summed up."""
        dtype, wide = self.source.head.autocast or self.source.x.dtype, accumulation_dtype(weight.dtype)
        rows = len(self.source.x)
        few = is_on_gpu(self.source.x) and rows <= SUMMED * self.chunk_rows(rows, dtype.itemsize)
        return weight.dtype if few else wide

    def chunk_rows(self, count: int, itemsize: int) -> int:
        """Of `count` rows, how many are a chunk."""
        return max(1, min(count, max(ROWS, in_tiles(self.room // (self.source.width * itemsize)))))

    def columns(self, count: int, itemsize: int) -> int:
        """How many columns of `count` rows are a block."""
        room = max(chunk_bytes(self.source.x), self.source.head.room - self.source.x.nbytes)  # a sum of dx beside it
        return min(self.source.width, max(COLUMNS, in_tiles(room // (itemsize * max(1, count)))))

    def rows(self, x: Tensor, kept: Tensor | None) -> Tensor:
        """The rows that count, in the dtype of the product."""
        return (x if kept is None else x[kept]).to(self.source.head.autocast or x.dtype)

    def chunks(self, rows: Tensor) -> Iterator[slice]:
        """Slices of the rows."""
        return _slices(len(rows), self.chunk_rows(len(rows), rows.element_size()), rows)

    def blocks(self, rows: Tensor) -> Iterator[slice]:
        """Slices of the columns."""
        return _slices(self.source.width, self.columns(len(rows), rows.element_size()), rows)

    def matrix(self, weight: Tensor, columns: slice) -> Tensor:
        """(columns, in), in the dtype of the product."""
        block = weight[:, columns].t() if self.source.head.transposed else weight[columns]
        return block.to(self.source.head.autocast or weight.dtype)

    def logits(self, rows: Tensor, matrix: Tensor, bias: Tensor | None, columns: slice) -> Tensor:
        """Of the head itself: (rows, columns)."""
        return F.linear(rows, matrix, None if bias is None else bias[columns].to(matrix.dtype))

    def operated(self, y: Tensor, columns: slice) -> Tensor:
        """`y` after what the model did to its logits."""
        for operation in self.source.operations:
            y = operation.run(y, columns)
        return y

    def through_operations(self, y: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
        """`y` as a leaf, and :meth:`operated` with a graph; `y` twice where there are no operations."""
        if not self.source.operations:
            return y, y
        # Whoever watches saved tensors outside (checkpointing, offloading) has to see none of a chunk.
        with torch.enable_grad(), saved_tensors_hooks(itself, itself):
            y = y.detach().requires_grad_()
            return y, self.operated(y, columns)

    def before_operations(
        self, y: Tensor, z: Tensor, dz: Tensor, wanted: Sequence[Tensor], sums: Sequence[Tensor | None]
    ) -> Tensor:
        """The gradient of `y`, and what operations add to the `sums` of those of the tensors that are `wanted`."""
        if y is z:
            return dz
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


def place_of(y: Tensor, z: Tensor) -> Tensor:
    """Where the gradient of `z` is written: over it, but where operations made it, which may have saved it."""
    return z if y is z else torch.empty_like(z)


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
