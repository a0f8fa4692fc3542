"""A module that keeps its inputs only, and runs its own forward again in backward.

For modules that no formula here covers, in which autograd keeps more than what goes in: a gated norm, written as a
dozen operations in fp32, saves most of their results. Value and gradients are the stock module's to the last bit, since
the same code computes them; the price is that code's time once more, twice where a reader needs the output again.

Saved for backward: the inputs, and copies of the parameters (small vectors). The output can be recomputed, so its
readers save a handle inside a `memopt.saved.RecomputeScope`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from memopt.kernels.base.autograd import autocast_as, autocast_dtype, is_batched, refuse_double_backward
from memopt.recompute_rules import NORMALISED, Node, recomputable

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
        ctx.run, ctx.count, ctx.recomputes_output = run, count, True
        ctx.autocast = autocast_dtype(tensors[0])
        copies = [parameter.detach().clone() for parameter in tensors[count:]]
        ctx.save_for_backward(*tensors[:count], *copies)
        return run(tensors[:count], tensors[count:])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
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
    # Backward runs outside the forward's autocast region, which decides in what dtype each step is computed.
    with torch.enable_grad(), autocast_as(ctx.autocast, tensors[0]):
        return tensors, ctx.run(tensors[: ctx.count], tensors[ctx.count :])


@recomputable("ReplayFunctionBackward", NORMALISED, lambda node: getattr(node, "recomputes_output", False))
def _output(node: Node) -> Tensor:
    tensors = node.saved_tensors
    with autocast_as(node.autocast, tensors[0]):
        y: Tensor = node.run(tensors[: node.count], tensors[node.count :])
    return y
