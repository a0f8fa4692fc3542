"""A module that keeps its inputs only, and runs its own forward again in backward.

For modules that no formula here covers, in which autograd keeps more than what goes in: a gated norm, written as a
dozen operations in fp32, saves most of their results. Value and gradients are the stock module's to the last bit, since
the same code computes them; the price is that code's time once more, twice where a reader needs the output again.

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
from memopt.recompute.rules import NORMALISED, register_operator
from memopt.recompute.specs import Recomputed

#: run(inputs, parameters) -> the module's output
Replay = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]


def replayed(run: Replay, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    """``run(inputs, parameters)``, keeping `inputs` and copies of `parameters` only.

    Args:
        run: without randomness and without effects; gives the same for the same tensors.
        inputs: of any shape and dtype, kept as they are.
        parameters: small ones: they are copied, because a sharding tool may have freed them when a reader of the
            output, in another shard unit, runs its backward first.
    """
    y: Tensor = ReplayFunction.apply(run, len(inputs), *inputs, *parameters)  # type: ignore[no-untyped-call]
    return y


class ReplayFunction(torch.autograd.Function):
    """Keeps what goes in; differentiates `run` again in backward."""

    @staticmethod
    def forward(ctx: Any, run: Replay, count: int, *tensors: Tensor) -> Tensor:
        ctx.recomputes_output = True
        ctx.recomputed = Recomputed(functools.partial(_value, run, count, autocast_dtype(tensors[0])))
        copies = [parameter.detach().clone() for parameter in tensors[count:]]
        ctx.save_for_backward(*tensors[:count], *copies)
        return run(tensors[:count], tensors[count:])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        ctx.recomputed.finish()
        needs = ctx.needs_input_grad[2:]
        saved = ctx.saved_tensors
        if is_batched((dy,)):
            # A transform refuses new leaves and random numbers, and holds for the thread that entered it.
            with ThreadPoolExecutor(1) as outside:
                tensors, y = outside.submit(_run_again, ctx, saved).result()
        else:
            tensors, y = _run_again(ctx, saved)
        wanted = [tensor for tensor, need in zip(tensors, needs, strict=True) if need]
        found = iter(torch.autograd.grad(y, wanted, dy, allow_unused=True))
        return None, None, *(next(found) if need else None for need in needs)


def _run_again(ctx: Any, saved: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Leaves with the values of `saved`, and what the module makes of them."""
    needs = ctx.needs_input_grad[2:]
    tensors = [tensor.detach().requires_grad_(need) for tensor, need in zip(saved, needs, strict=True)]
    with torch.enable_grad():
        return tensors, ctx.recomputed.function(*tensors)


def _value(run: Replay, count: int, autocast: torch.dtype | None, *tensors: Tensor) -> Tensor:
    """The output. Backward runs outside the forward's autocast region, which decides in what dtype each step is
    computed."""
    with autocast_as(autocast, tensors[0]):
        return run(tensors[:count], tensors[count:])


register_operator("ReplayFunctionBackward", NORMALISED)
