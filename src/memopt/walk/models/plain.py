"""The plain functions that transformers keeps beside kernels of other packages (flash-linear-attention, mamba-ssm, ...).

A kernel runs on a GPU alone: neither on meta tensors, by which a model is walked and predicted, nor on the CPU.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

_DECORATORS = "transformers.integrations.hub_kernels"


@contextlib.contextmanager
def plain_functions(model: nn.Module) -> Iterator[None]:
    """Inside, the classes of `model` and of its twins call plain functions in the place of kernels.

    The names in the modules of their code are exchanged, for the whole process.
    """
    exchanged = [(vars(home), name, value) for home in _homes(model) for name, value, _ in _kernels(home)]
    for names, name, value in exchanged:
        names[name] = _wrapper(value).__wrapped__
    try:
        yield
    finally:
        for names, name, value in exchanged:
            names[name] = value


def kernel_packages(model: nn.Module) -> dict[str, str]:
    """Function -> the package whose kernel the code of `model` calls in its place."""
    return {name: package for home in _homes(model) for name, _, package in _kernels(home) if package}


def _homes(model: nn.Module) -> list[ModuleType]:
    """The modules in which the classes of `model` are defined."""
    names = {each.__module__: None for cls in {type(module) for module in model.modules()} for each in cls.__mro__}
    return [sys.modules[name] for name in names if name in sys.modules and not name.startswith("torch.")]


def _kernels(home: ModuleType) -> Iterator[tuple[str, Any, str]]:
    """Of each function that may be a kernel: its name, what stands for it, the package ('': it is the plain one)."""
    for name, value in list(vars(home).items()):
        wrapper = _wrapper(value)
        if wrapper is not None:
            chosen = inspect.getclosurevars(wrapper).nonlocals
            yield name, value, chosen["package"] if chosen.get("is_new_implementation") else ""


def _wrapper(value: Any) -> Any:
    """The function that calls a kernel or, where its package is missing, the plain function ``__wrapped__``."""
    if isinstance(value, nn.Module) and hasattr(value, "kernel_layer_name"):  # as the package `kernels` makes it
        forward: Callable[..., Any] = type(value).forward
        value = inspect.getclosurevars(forward).nonlocals.get("func")
    is_one = isinstance(value, FunctionType) and value.__globals__.get("__name__") == _DECORATORS
    return value if is_one and hasattr(value, "__wrapped__") else None
