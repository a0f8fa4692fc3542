"""Functions that return a few numbers a row, by chunks of rows: memory holds the logits of one chunk at a time.

    forward     y = ops(head(x_chunk)),  results = finish(y)             nothing of a chunk is saved
    backward    y is computed again a chunk at a time, dx and the gradients of the head's parameters by its own graph

For any head (adapters, quantised weights) and any such function. `plain.py` has the cross-entropy of a plain linear.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memopt.kernels.base.autograd import (
    accumulation_dtype,
    as_leaf,
    batched_gradients,
    is_batched,
    refuse_double_backward,
)
from memopt.kernels.base.device import runs_triton
from memopt.patches.loss.source import Source
from memopt.torch_compat import DirectFunction, FakeTensor, without_foreign_hooks

#: Least bytes of a chunk. A chunk takes as many bytes as the head's input, so that the loss takes no more than one more
#: activation; with fewer bytes than these, a product would have hardly any rows.
SMALLEST_CHUNK = 2**23
#: On a GPU a chunk takes up to GPU_CHUNK bytes, so that products take longer than launches, but at most ACTIVATIONS
#: times x. A block's backward takes as much: an MLP 4 times as wide as x recomputes its activation, and has a gradient.
GPU_CHUNK, ACTIVATIONS = 2**27, 8
#: Rows or columns of a tile of a product on a GPU, which computes whole tiles only.
TILE = 256
#: Bytes for a logit of a chunk, its exponential and its gradient, in fp32 at most.
LOGIT_BYTES = 12

#: (logits of a chunk, a chunk of each argument) -> results with as many rows
Finish = Callable[..., tuple[Tensor, ...]]


def chunk_bytes(x: Tensor) -> int:
    """How many bytes a chunk of logits may take."""
    own = x.numel() * x.element_size()
    return max(own, SMALLEST_CHUNK, min(ACTIVATIONS * own, GPU_CHUNK) if is_on_gpu(x) else 0)


def fits(x: Tensor, width: int, room: int) -> bool:
    """Whether all logits of `x` take no more than a chunk, or than `room` bytes."""
    return x.shape[:-1].numel() * width * x.itemsize <= max(chunk_bytes(x), room)


def is_on_gpu(x: Tensor) -> bool:
    """Whether `x` is on a GPU, or is a fake tensor for one on a GPU."""
    return x.is_cuda or (isinstance(x, FakeTensor) and runs_triton(x))


def in_tiles(count: int) -> int:
    """`count` rows or columns, rounded down to whole tiles, or to a power of two below one tile; 1 at least."""
    tile = min(TILE, 1 << max(1, count).bit_length() - 1)
    return max(1, count // tile * tile)


def product_rows(source: Source) -> int:
    """Rows of every product whose numbers the user gets (`Source.product_rows`); all rows of the call if fewer.
    Products of different shapes may round differently. Products of one shape round a row alike, wherever it stands."""
    room = max(chunk_bytes(source.x), source.head.room)
    most = TILE if is_on_gpu(source.x) else TILE // 2
    return min(most, in_tiles(room // (LOGIT_BYTES * source.width)), max(1, source.x.shape[:-1].numel()))


def by_rows(
    source: Source, finish: Finish, arguments: Sequence[Tensor] = (), logit_bytes: int = LOGIT_BYTES,
    *, rows: int = 0,
) -> tuple[Tensor, ...]:  # fmt: skip
    """``finish(logits, *arguments)`` for logits of shape (rows, V).

    Args:
        source: what the logits are computed from.
        finish: a function of rows that does not mix them.
        arguments: tensors of which a chunk of rows is passed to `finish`; no gradient flows to them.
        logit_bytes: bytes that a logit takes, with `finish` and its backward.
        rows: rows of every product, if results may be compared with other logits of the same call; 0: any number.
    """
    if source.head.gathers:
        return source.in_call(lambda inside: by_rows(inside, finish, arguments, logit_bytes, rows=rows))
    x = source.x.reshape(-1, source.x.shape[-1])
    plan = _Plan(source, finish, len(arguments), logit_bytes, rows)
    if source.tracked and torch.is_grad_enabled():
        results: tuple[Tensor, ...] = _RowsFunction.apply(plan, x, *arguments, *source.tensors)
        return results
    with torch.no_grad():
        return plan.results(x, arguments)


@dataclass(frozen=True, eq=False)
class _Plan:
    source: Source
    finish: Finish
    count: int
    """The number of arguments."""
    logit_bytes: int
    rows: int
    """Rows of every product; 0: any number."""

    def chunks(self, x: Tensor, arguments: Sequence[Tensor]) -> Iterator[tuple[slice, Tensor, list[Tensor]]]:
        room = max(chunk_bytes(x), self.source.head.room)
        rows = self.rows or in_tiles(room // (self.logit_bytes * self.source.product_width))
        for start in range(0, max(1, len(x)), rows):
            part = slice(start, min(start + rows, len(x)))
            yield part, x[part], [argument[part] for argument in arguments]

    def results(self, x: Tensor, arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
        found = []
        for _, rows, given in self.chunks(x, arguments):
            self.source.check()
            found.append(self.finish(self.source.values(rows, self.rows), *given))
        return tuple(torch.cat(each) for each in zip(*found, strict=True))


class _RowsFunction(DirectFunction):
    @staticmethod
    def forward(ctx: Any, plan: _Plan, x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.plan = dataclasses.replace(plan, source=plan.source.without_rows)
        ctx.save_for_backward(x, *tensors)
        results = plan.results(x, tensors[: plan.count])
        ctx.mark_non_differentiable(*(each for each in results if not each.is_floating_point()))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        plan: _Plan = ctx.plan
        x, *tensors = ctx.saved_tensors
        arguments, tensors = tensors[: plan.count], tensors[plan.count :]
        wanted = ctx.needs_input_grad[1]
        source = plan.source.cut
        if is_batched(gradients):
            with torch.enable_grad(), without_foreign_hooks():
                leaf = as_leaf(x)
                results = plan.finish(source.values(leaf), *arguments)
            found = batched_gradients(results, (leaf, *source.tensors), gradients)
            return None, found[0], *(None for _ in arguments), *found[1:]
        dx = torch.empty_like(x) if wanted else None
        sums: list[Tensor | None] = [None] * len(tensors)  # None stays where no chunk reads the tensor, as in stock
        for part, rows, given in plan.chunks(x, arguments):
            # Foreign saved-tensor hooks (checkpointing, offloading) must not get the saved tensors of a chunk.
            with torch.enable_grad(), without_foreign_hooks():
                leaf = rows.detach().requires_grad_(wanted)
                results = plan.finish(source.values(leaf, plan.rows), *given)
                pairs = [(y, dy[part]) for y, dy in zip(results, gradients, strict=True) if y.requires_grad]
                outputs, incoming = zip(*pairs, strict=True) if pairs else ((), ())
            inputs = (leaf, *source.tensors) if wanted else source.tensors
            found = list(torch.autograd.grad(outputs, inputs, incoming, allow_unused=True))
            if dx is not None:
                first = found.pop(0)
                dx[part] = 0 if first is None else first
            for i, gradient in enumerate(found):
                if gradient is not None:
                    total, wide = sums[i], accumulation_dtype(gradient.dtype)
                    sums[i] = gradient.to(wide, copy=True) if total is None else total.add_(gradient)
        dtensors = (None if total is None else total.to(each.dtype) for total, each in zip(sums, tensors, strict=True))
        return None, dx, *(None for _ in arguments), *dtensors
