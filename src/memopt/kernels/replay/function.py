"""A module that saves only its inputs, and runs its own forward again in backward.

For modules without an operator here, in which autograd saves more than the inputs: a gated norm, written as a dozen
operations in fp32, saves most of their results. Value and gradients equal the stock module's to the last bit, since the
same code computes them. The cost is one more forward, or two if a reader needs the output again.

Saved for backward: the inputs, and copies of the parameters (small vectors). The output can be recomputed, so its
readers save a handle inside a `memopt.saved.RecomputeScope`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from memopt.kernels.base.autograd import autocast_as, autocast_dtype, is_batched, refuse_double_backward
from memopt.recompute.rules import ELEMENTWISE, NORMALISED, register_operator
from memopt.recompute.specs import Recomputed, attach_spec

#: run(inputs, parameters) -> the module's output
Replay = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]


def replayed(run: Replay, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    """``run(inputs, parameters)``, saving only `inputs` and copies of `parameters`.

    Args:
        run: without randomness and side effects; equal tensors give equal results.
        inputs: of any shape and dtype, saved as they are.
        parameters: small ones. They are copied, because sharded training may free them before a reader of the output,
            in another shard unit, runs its backward.
    """
    y: Tensor = ReplayFunction.apply(run, len(inputs), *inputs, *parameters)  # type: ignore[no-untyped-call]
    return y


def recomputed_chain(value: Tensor, run: Replay, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    """`value`, a new tensor equal to ``run(inputs, parameters)``, as the result of an operation like :func:`replayed`.

    Args:
        run, inputs, parameters: as in :func:`replayed`.
    """
    y: Tensor = ChainFunction.apply(run, len(inputs), [value], *inputs, *parameters)  # type: ignore[no-untyped-call]
    if y.grad_fn is not None:
        node: Any = y.grad_fn
        attach_spec(y, node.saved_for_readers, node.recomputed)
        del node.saved_for_readers
    return y


class ReplayFunction(torch.autograd.Function):
    """Saves its inputs; backward runs `run` again and differentiates it."""

    @staticmethod
    def forward(ctx: Any, run: Replay, count: int, *tensors: Tensor) -> Tensor:
        _save(ctx, run, count, tensors)
        return run(tensors[:count], tensors[count:])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        ctx.recomputed.finish()
        saved = ctx.saved_tensors
        needs = ctx.needs_input_grad[-len(saved) :]
        return None, None, *gradients_again(lambda tensors: [ctx.recomputed.function(*tensors)], saved, needs, [dy])


class ChainFunction(torch.autograd.Function):
    """As :class:`ReplayFunction`, for a value that is computed already."""

    @staticmethod
    def forward(ctx: Any, run: Replay, count: int, value: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.saved_for_readers = _save(ctx, run, count, tensors)
        return value.pop()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ReplayFunction.backward(ctx, dy)


def _save(ctx: Any, run: Replay, count: int, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    ctx.recomputes_output = True
    ctx.recomputed = Recomputed(functools.partial(_value, run, count, autocast_dtype(tensors[0])))
    saved = *tensors[:count], *(parameter.detach().clone() for parameter in tensors[count:])
    ctx.save_for_backward(*saved)
    return saved


def gradients_again(
    run: Callable[[Sequence[Tensor]], list[Tensor]],
    saved: Sequence[Tensor],
    needs: Sequence[bool],
    gradients: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """The needed gradients of `saved`, from the `gradients` of the tensors that ``run(saved)`` returns."""
    if all(each is None for each in gradients):
        return [None] * len(needs)

    def again() -> tuple[list[Tensor], list[Tensor]]:
        leaves = [tensor.detach().requires_grad_(need) for tensor, need in zip(saved, needs, strict=True)]
        with torch.enable_grad():
            return leaves, run(leaves)

    if is_batched([each for each in gradients if each is not None]):
        # A function transform refuses new leaves and random numbers, but only in the thread that entered it.
        with ThreadPoolExecutor(1) as outside:
            leaves, outputs = outside.submit(again).result()
    else:
        leaves, outputs = again()
    wanted = [leaf for leaf, need in zip(leaves, needs, strict=True) if need]
    pairs = [(y, dy) for y, dy in zip(outputs, gradients, strict=True) if dy is not None and y.requires_grad]
    if not pairs:
        return [None] * len(needs)
    reached, given = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(reached, wanted, given, allow_unused=True))
    return [next(found) if need else None for need in needs]


def _value(run: Replay, count: int, autocast: torch.dtype | None, *tensors: Tensor) -> Tensor:
    """The output. Backward runs outside the forward's autocast region, which decides in what dtype each step is
    computed."""
    with autocast_as(autocast, tensors[0]):
        return run(tensors[:count], tensors[count:])


register_operator("ReplayFunctionBackward", NORMALISED)
register_operator("ChainFunctionBackward", ELEMENTWISE)
