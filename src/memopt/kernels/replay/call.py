"""A call of a pure function that saves only its arguments, and runs again in backward.

Linear attention in plain PyTorch (the gated delta rule, state space models) saves dozens of fp32 intermediates for each
chunk of tokens, more than the rest of its block. Value and gradients equal the function's own to the last bit; the cost
is one more forward of the function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memopt.kernels.base.autograd import autocast_as, autocast_dtype, refuse_double_backward
from memopt.kernels.replay.function import gradients_again
from memopt.recompute.pure import with_tensors, without_tensors
from memopt.recompute.versions import versions_of
from memopt.torch_compat import tree_leaves

#: run(tensors) -> the function's result: tensors and plain values, in tuples and lists.
Run = Callable[[Sequence[Tensor]], Any]


def replayed_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], differentiable: Sequence[bool]
) -> Any:
    """``function(*args, **kwargs)``, saving only the tensors among its arguments. It can be differentiated once.

    Args:
        function: pure (`memopt.recompute.pure`).
        differentiable: for each tensor of the result, in order, whether it requires a gradient.

    Raises:
        RuntimeError: `function` changed an argument in place.
    """
    values = tuple(args), dict(kwargs)
    tensors, template = _tensors(values), without_tensors(values)

    def run(given: Sequence[Tensor]) -> Any:
        positional, named = with_tensors(template, given)
        return function(*positional, **named)

    returned: list[Any] = []
    outputs = ReplayedCallFunction.apply(run, tuple(differentiable), returned, *tensors)  # type: ignore[no-untyped-call]
    return with_tensors(returned[0], outputs)


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


class ReplayedCallFunction(torch.autograd.Function):
    """Saves the tensors among the arguments; backward runs `run` again and differentiates it."""

    __memopt_saves__ = "function input"

    @staticmethod
    def forward(
        ctx: Any, run: Run, differentiable: tuple[bool, ...], returned: list[Any], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)
        ctx.run, ctx.autocast = run, autocast_dtype(tensors[0])
        ctx.set_materialize_grads(False)
        before = versions_of(tensors)
        result = run(tensors)
        outputs = _tensors(result)
        returned.append(without_tensors(result))
        if versions_of(tensors) != before:  # autograd saves the changed tensors
            why = "A function of the model's code changed its arguments in place: it cannot run again in backward."
            raise RuntimeError(f"{why} Patch the model with functions.method=none.")
        constants = (each for each, known in zip(outputs, differentiable, strict=True) if not known)
        ctx.mark_non_differentiable(*constants)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_double_backward()

        def run(tensors: Sequence[Tensor]) -> list[Tensor]:
            with autocast_as(ctx.autocast, tensors[0]):
                return _tensors(ctx.run(tensors))

        return None, None, None, *gradients_again(run, ctx.saved_tensors, ctx.needs_input_grad[3:], gradients)
