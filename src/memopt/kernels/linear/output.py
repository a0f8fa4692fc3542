"""An output that its readers recompute from the input it was computed from.

    forward     y = run(x)          backward    dx, dW as run's own graph computes them; y = run(x) once for its readers

The function passes y on and saves x. Inside a `memopt.saved.RecomputeScope` whoever saves y, or a view or cast of it,
saves a handle instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from memopt.kernels.base.autograd import DirectFunction
from memopt.recompute.rules import LINEAR, register_operator
from memopt.recompute.specs import Recomputed


def recomputed_output(y: Tensor, x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    """`y`, which readers inside a scope recompute as ``run(x)``.

    Args:
        y: any shape, floating point, with its graph. Nobody else refers to it.
        x: what it was computed from; saved.
        run: gives y again, without a graph, in backward; raises where it cannot.
    """
    output: Tensor = OutputFunction.apply(y, x, run)
    return output


class OutputFunction(DirectFunction):
    """Passes y on; saves x. It is linear, so its backward can be differentiated."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.recomputes_output, ctx.recomputed = True, Recomputed(run)
        ctx.save_for_backward(x)
        return y.data  # neither an input nor a tracked view of one

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        ctx.recomputed.finish()
        return dy, None, None


register_operator("OutputFunctionBackward", LINEAR)
