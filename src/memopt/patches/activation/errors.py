"""Errors of the derivatives of coded activations, measured on the inputs that the modules get."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from memopt.kernels.derivative_codes.codes import apply_code, encode
from memopt.kernels.derivative_codes.schemes import DerivativeCode, derivative
from memopt.patches.activation.module import ActivationRewrite
from memopt.patches.swap import is_swapped, original_class, swap_state


@contextmanager
def code_errors(model: nn.Module) -> Iterator[list[float]]:
    """Inside, each call of a coded activation adds the relative error of its derivative on that input to the list."""
    errors: list[float] = []

    def measure(code: DerivativeCode, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        z = args[0].detach().float()
        stock = functools.partial(original_class(module).forward, module)
        with torch.no_grad():
            exact = derivative(stock, z).double()
            approximate = apply_code(torch.ones_like(z), encode(z, code), code).double()
        off, size = float((approximate - exact).square().sum()), float(exact.square().sum())
        errors.append((off / size) ** 0.5 if size else float("inf") if off else 0.0)

    states = [(module, swap_state(module)) for module in model.modules() if is_swapped(module)]
    handles = [
        module.register_forward_hook(functools.partial(measure, state.code))
        for module, state in states
        if isinstance(state, ActivationRewrite) and state.code is not None
    ]
    try:
        yield errors
    finally:
        for handle in handles:
            handle.remove()
