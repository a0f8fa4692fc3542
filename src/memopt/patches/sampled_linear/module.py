"""Linears whose weight gradient is estimated from a sample of the rows of their input, if that frees the input.

A module qualifies by the function that it computes with its weight and bias, not by its class. It keeps its class.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memopt.kernels.base.autograd import autocast_dtype
from memopt.kernels.linear.function import is_plain
from memopt.kernels.sampled_linear.function import SampledLinearFunction
from memopt.patches.linear.module import linear_reads
from memopt.patches.sampled_linear.rules import SampledLinearRules
from memopt.patches.sampled_linear.slot import Sampling, save_sampled
from memopt.patches.sampled_linear.visits import Visits
from memopt.patches.swap import parameters_of, states_in, steps_aside, swap_forward
from memopt.recompute.specs import shared_cast
from memopt.walk.probes.linear import is_linear


@dataclass(frozen=True)
class SampledLinearRewrite:
    """State of a sampled linear."""

    transposed: bool
    """Whether its weight is (in, out) instead of (out, in)."""
    has_bias: bool
    sampling: Sampling
    visits: Visits
    """Data about calls of its model: padding, samples and norms of gradients."""
    number: int
    """Number of this linear in `visits`."""


def patch_sampled_linear(
    module: nn.Module, sampling: Sampling, visits: Visits | None = None, name: str = "a linear"
) -> None:
    """Let `module` save a sample of the rows of its input, if nothing else holds the input.

    Args:
        visits: the object with which the model around `module` is, or will be, patched
            (`memopt.patches.sampled_linear.visits`).
        name: name of the module in warnings.

    Raises:
        ValueError: the module cannot be swapped, or is not a linear of its own weight and bias.
    """
    transposed = not is_linear(module)
    if transposed and not is_linear(module, transposed=True):
        raise ValueError("it is not a linear of its own weight and bias")
    has_bias = module._parameters.get("bias") is not None
    visits = Visits() if visits is None else visits
    rewrite = SampledLinearRewrite(transposed, has_bias, sampling, visits, len(visits.padding))
    swap_forward(module, _forward, rewrite, linear_reads(module))
    visits.padding.add(name)


def sampling_of(rules: SampledLinearRules) -> Sampling:
    """The sampling that rules with a method other than none describe."""
    assert rules.method != "none"
    return Sampling(rules.method, rules.budget)


def samplings_in(model: nn.Module) -> dict[str, SampledLinearRewrite]:
    """Name -> state of the sampled linears of `model`."""
    return {name: state for name, _, state in states_in(model, SampledLinearRewrite)}


def _forward(
    stock: Callable[..., Tensor], rewrite: SampledLinearRewrite, module: nn.Module, *args: Any, **kwargs: Any
) -> Tensor:
    given, parameters = (*args, *kwargs.values()), parameters_of(module)
    weight, bias = parameters.get("weight"), parameters.get("bias")
    # A frozen weight needs no input. Tools that compute weight or bias from other tensors remove the parameters.
    as_patched = weight is not None and weight.requires_grad and (bias is not None) == rewrite.has_bias
    if (
        steps_aside(off="linears sample no rows, and gradients are exact; samples need eager mode")
        or len(given) != 1
        or not as_patched
        or not is_plain(weight)
        or not is_plain(given[0])
        or not given[0].requires_grad  # its input is kept whole; the stock module then does not even save the weight
        or given[0].layout is not torch.strided
        or given[0].is_nested
    ):
        return stock(module, *args, **kwargs)
    x = shared_cast(given[0], autocast_dtype)
    call = rewrite.visits.call(rewrite.number, x)
    importance, report = (None, None) if call is None else (call.importance, call.report)
    run = functools.partial(stock, module)
    y = save_sampled(
        lambda slot: SampledLinearFunction.apply(  # type: ignore[no-untyped-call]
            x, weight, bias, rewrite.transposed, run, slot, report
        ),
        rewrite.sampling,
        importance,
    )
    return run(x) if y is None else y
