"""Linears that save the tensors of their input's recompute spec instead of their input, if the input has a spec.

A module qualifies by its function of weight and bias, not by its class. The backward of a linear behind an activation
may include the activation's backward, and then recomputes the activation's output in the same pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memopt.kernels.base.autograd import autocast_dtype
from memopt.kernels.linear.function import cast_linear, is_plain, reads_spec, recomputed_linear, saves_a_cast_weight
from memopt.kernels.linear.weighted import followed, noted
from memopt.patches.linear.adapted import AdaptedRewrite, as_adapted, reads_specs, run_adapted
from memopt.patches.linear.output import OutputRewrite, patch_output
from memopt.patches.reads import Reads, observed_reads
from memopt.patches.swap import (
    is_swapped,
    is_watched,
    parameters_of,
    restore_forward,
    state_of,
    steps_aside,
    swap_forward,
    swap_state,
)
from memopt.recompute.specs import SPEC_ATTRIBUTE, shared_cast
from memopt.saved.scope import unseen
from memopt.torch_compat import any_autocast_enabled, no_torch_function
from memopt.walk.probes.linear import is_linear


@dataclass(frozen=True)
class LinearRewrite:
    """State of a patched linear."""

    transposed: bool
    """Its weight is (in, out) instead of (out, in)."""
    has_bias: bool
    fuses: bool = True
    """It is the only reader of its input, so its backward may include the producer's backward."""


def patch_linear(module: nn.Module, *, fuses: bool = True) -> None:
    """Let `module` save the tensors that its input is recomputed from, if the input has a spec; `fuses` is as in
    :class:`LinearRewrite`. Raises a ValueError if the module cannot be swapped, or is not a linear of its own weight
    and bias."""
    if not (is_linear(module) or is_linear(module, transposed=True)):
        raise ValueError("it is not a linear of its own weight and bias")
    has_bias = module._parameters.get("bias") is not None
    swap_forward(module, _forward, LinearRewrite(not is_linear(module), has_bias, fuses), linear_reads(module))


def linear_reads(module: nn.Module) -> Reads | None:
    """The attributes for which `module` was proved to be a linear; None for `nn.Linear`, which needs no proof."""
    return None if type(module) is nn.Linear else observed_reads(module, None)


def trains_as_linear(module: nn.Module) -> bool:
    """Whether :func:`patch_linear` accepts `module` and saves anything: a frozen weight needs no saved input."""
    weight = module._parameters.get("weight")
    if weight is None or not weight.requires_grad or is_swapped(module):
        return False
    return is_linear(module) or is_linear(module, transposed=True)


def adopt_linears(root: nn.Module, *, outputs: Mapping[str, bool] | None = None) -> None:
    """Let plain linears inside `root` read recompute specs, adapters' included, unless another patch has them.

    `outputs` names linears inside `root` whose output is recomputed, and tells whether their input is saved anyway.

    A linear whose input has no spec runs its stock forward, so this is safe for any place in the model. A child stays
    stock if its patched parent reads the child's parameters instead of calling it (`reads` of the parent's state).
    """
    if outputs:
        _adopt_outputs(root, outputs)
    for parent in list(root.modules()):
        read = getattr(swap_state(parent), "reads", ()) if is_swapped(parent) else ()
        for name, child in parent._modules.items():
            # The forward of this class is known. Other classes need a proof, which must not run inside a forward.
            if type(child) is nn.Linear and "forward" not in vars(child) and name not in read:
                swap_forward(child, _forward, LinearRewrite(False, child.bias is not None, fuses=False))
            elif child is not None and not is_swapped(child) and (rewrite := as_adapted(child)) is not None:
                swap_forward(child, run_adapted, rewrite)


def _adopt_outputs(root: nn.Module, outputs: Mapping[str, bool]) -> None:
    """Apply :func:`patch_output` to the modules that have these names now: adapters may have been added or removed.
    `outputs`: name relative to `root` -> `input_is_saved`."""
    there = dict(root.named_modules())
    standing = {name: there[name] for name in outputs if name in there}
    for name, module in standing.items():
        if is_swapped(module):
            if not isinstance(swap_state(module), (LinearRewrite, AdaptedRewrite)):
                continue
            restore_forward(module)  # it was adopted, for example while it was inside an adapter
        for inner in module.modules():  # inside an adapter now; only the module around it recomputes its output
            if state_of(inner, OutputRewrite) is not None and inner not in standing.values():
                restore_forward(inner)
        with contextlib.suppress(ValueError):  # replaced since, or wrapped by a tool: it stays stock
            patch_output(module, input_is_saved=outputs[name])


@reads_specs
def _forward(
    stock: Callable[..., Tensor], rewrite: LinearRewrite, module: nn.Module, *args: Any, **kwargs: Any
) -> Tensor:
    x: Any = args[0] if args else next(iter(kwargs.values()), None)
    if getattr(x, SPEC_ATTRIBUTE, None) is None and (torch.compiler.is_compiling() or not any_autocast_enabled()):
        return stock(module, *args, **kwargs)
    if unseen.depth:
        with no_torch_function():
            return _reading(stock, rewrite, module, x, args, kwargs)
    return _reading(stock, rewrite, module, x, args, kwargs)


def _reading(
    stock: Callable[..., Tensor], rewrite: LinearRewrite, module: nn.Module, x: Any, args: Any, kwargs: dict[str, Any]
) -> Tensor:
    # A tool that computes weight or bias from other tensors removes them from the parameters.
    parameters: Mapping[str, Tensor | None] = module._parameters
    if "weight" not in parameters:  # spares most calls a function
        parameters = parameters_of(module)
    weight, bias = parameters.get("weight"), parameters.get("bias")
    if weight is None or (bias is None) is rewrite.has_bias or len(args) + len(kwargs) != 1 or steps_aside():
        return stock(module, *args, **kwargs)
    if any_autocast_enabled():
        x = shared_cast(x, autocast_dtype)
    spec = reads_spec(x, weight)
    matrix = weight.t() if rewrite.transposed else weight
    if spec is None and not saves_a_cast_weight(x, weight):
        y = stock(module, x)
        # The function mode that follows products did not see this one, so it is noted here.
        is_hidden = unseen.depth and followed.products is not None and is_plain(y) and is_plain(weight)
        return noted(y, x, matrix, bias, None) if is_hidden else y
    if spec is None:
        return cast_linear(x, matrix, bias)
    fuses = rewrite.fuses and spec.differentiate is not None and not is_watched(module)
    return recomputed_linear(x, matrix, bias, spec, fuses=fuses)
