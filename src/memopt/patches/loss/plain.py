"""The cross-entropy of a plain linear, x W^T + b: what its two ways share, and which one is taken.

By chunks of rows (`at_once.py`) the gradients are made in the forward, by three products, or two for a frozen head. A
gradient of W in 16 bits then needs a sum in fp32 of twice its size, and chunks of few rows waste the products. By
blocks of columns (`blocks.py`) neither is so, and the logits are computed twice: one product more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from memopt.kernels.base.device import runs_triton
from memopt.kernels.base.pieces import pieces
from memopt.kernels.base.precision import accumulation_dtype
from memopt.kernels.loss.reference import LossArguments
from memopt.patches.loss.rows import chunk_bytes, itself
from memopt.patches.loss.source import Source, distinct
from memopt.torch_compat import FakeTensor

#: Rows of a chunk with which a product is not bound by reading W.
ROWS = 256
#: Blocks of columns are multiples of it.
COLUMNS = 64


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
    def is_at_once(self) -> bool:
        """Whether gradients are made in the forward, of a loss that is one number.

        The loss is to take no more than one more activation: a chunk of enough rows is no larger than `chunk_bytes`,
        nor is the sum that W's gradient needs beside itself.
        """
        source, (x, weight, *_) = self.source, self.tensors
        assert x is not None
        assert weight is not None
        rows, limit = min(len(x), ROWS), chunk_bytes(x)
        dtype = source.head.autocast or x.dtype
        if dtype == torch.float16:
            return False  # gradients made in the forward would be too small for it: the loss is not scaled yet
        in_sum = weight.requires_grad and weight.dtype != accumulation_dtype(weight.dtype)
        return rows * source.width * dtype.itemsize <= limit and (not in_sum or 4 * weight.numel() <= limit)

    def rows(self, x: Tensor, kept: Tensor | None) -> Tensor:
        """The rows that count, in the dtype of the product."""
        return (x if kept is None else x[kept]).to(self.source.head.autocast or x.dtype)

    def chunks(self, rows: Tensor) -> Iterator[slice]:
        """Slices of the rows."""
        count = max(1, min(len(rows), ROWS), chunk_bytes(rows) // (self.source.width * rows.element_size()))
        starts = range(0, len(rows), count)
        return pieces((slice(first, min(first + count, len(rows))) for first in starts), rows)

    def blocks(self, rows: Tensor) -> Iterator[slice]:
        """Slices of the columns."""
        width = self.source.width
        columns = chunk_bytes(rows) // (rows.element_size() * max(1, len(rows))) // COLUMNS * COLUMNS
        starts = range(0, width, max(COLUMNS, columns))
        return pieces((slice(first, min(first + max(COLUMNS, columns), width)) for first in starts), rows)

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
        """`y` as a leaf, and :meth:`operated` with a graph."""
        # Whoever watches saved tensors outside (checkpointing, offloading) has to see none of a chunk.
        with torch.enable_grad(), saved_tensors_hooks(itself, itself):
            y = y.detach().requires_grad_()
            return y, self.operated(y, columns)

    def into(self, dweight: Tensor, columns: slice) -> Tensor:
        """The part (columns, in) of a gradient of the weight."""
        return dweight[:, columns].t() if self.source.head.transposed else dweight[columns]


def is_plain(source: Source) -> bool:
    """Whether the head is a plain linear and nothing since has mixed columns."""
    return source.head.transposed is not None and all(operation.by_column for operation in source.operations)


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """``a @ b`` in `dtype`, rounded once."""
    if a.dtype == dtype:
        return a.mm(b)
    if a.is_cuda or (isinstance(a, FakeTensor) and runs_triton(a, b)):  # fake ones that stand for a CUDA device's
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype).mm(b.to(dtype))


def product_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Write :func:`product` in the dtype of `out` to it, without a temporary of its size where `a` has that dtype."""
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    else:
        out.copy_(product(a, b, out.dtype))


def sums_of(tensors: Any, needed: Any) -> list[Tensor | None]:
    """A sum for the gradient of each tensor that needs one."""
    return [
        torch.zeros_like(tensor, dtype=accumulation_dtype(tensor.dtype)) if need else None
        for tensor, need in zip(tensors, needed, strict=True)
    ]
