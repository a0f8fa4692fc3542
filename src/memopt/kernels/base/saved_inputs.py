"""Operators that save their inputs, and whose backward can compute their output in one pass with its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from memopt.kernels.base.autograd import are_from_checkpoint, is_largest_yet, refuse_double_backward
from memopt.kernels.base.device import runs_triton
from memopt.recompute.specs import Recompute, Recomputed
from memopt.torch_compat import DirectFunction


class Steps(NamedTuple):
    """An operator, as functions of its inputs."""

    value: Recompute
    """(*inputs) -> the output"""
    gradients: Callable[..., tuple[tuple[Tensor, ...], Tensor | None]]
    """(dh, *inputs, recompute, owns_dh, given_once) -> the gradients of the inputs and, with `recompute`, the output.
    With `owns_dh`, dh may be overwritten."""
    fits_into_dh: bool
    """Whether a gradient can be written over dh."""

    def differentiate(
        self,
        dh: Callable[[], Tensor],
        inputs: tuple[Tensor, ...],
        use: Callable[[Tensor], None] | None,
        given_once: bool = False,
    ) -> tuple[Tensor, ...]:
        """`memopt.recompute.specs.Differentiate`: in one pass with Triton, if output and gradients may be in memory
        together."""
        in_one_pass = use is not None and runs_triton(*inputs)
        if in_one_pass and self.fits_into_dh and not given_once and is_largest_yet(inputs[0]):
            in_one_pass = False
        if use is not None and not in_one_pass:
            use(self.value(*inputs))
        gradients, h = self.gradients(dh(), *inputs, recompute=in_one_pass, owns_dh=True, given_once=given_once)
        if use is not None and h is not None:
            use(h)
        return gradients


class SavedInputsFunction(DirectFunction):
    """Saves the inputs of an operator. Each operator has a subclass, so that its nodes have a name of their own."""

    @staticmethod
    def forward(ctx: Any, steps: Steps, recomputed: Recomputed, *inputs: Tensor) -> Tensor:
        ctx.steps, ctx.recomputes_output, ctx.recomputed = steps, True, recomputed
        ctx.given_once = are_from_checkpoint()
        ctx.save_for_backward(*inputs)
        return steps.value(*inputs)

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        ctx.recomputed.finish()
        gradients, _ = ctx.steps.gradients(dh, *ctx.saved_tensors, recompute=False, given_once=ctx.given_once)
        return None, None, *gradients  # autograd drops gradients that are not needed
