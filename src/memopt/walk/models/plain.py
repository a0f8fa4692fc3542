"""Plain functions that transformers keeps beside kernels of other packages (flash-linear-attention, mamba-ssm, ...).

A kernel runs on a GPU only: not on meta tensors, with which a model is walked and predicted, and not on the CPU.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

_DECORATORS = "transformers.integrations.hub_kernels"
#: Attribute of a function that stands for a kernel.
STANDS_FOR_KERNEL = "_memopt_stands_for_kernel"
_INHERITED = object()


@contextlib.contextmanager
def plain_functions(model: nn.Module, instead: Mapping[str, Callable[..., Any]] | None = None) -> Iterator[None]:
    """Inside, the classes of `model` and of its twins call plain functions in the place of kernels. `instead` has
    functions to call in the place of those plain functions, by kernel, if the kernel's package is installed."""
    others: list[tuple[ModuleType, str, Any]] = []
    for home in homes(model):
        for name, value, kernel, package in _kernels(home):
            other = (instead or {}).get(kernel) if package else None
            others.append((home, name, _wrapper(value).__wrapped__ if other is None else other))
    with exchanged(others):
        yield


@contextlib.contextmanager
def exchanged(others: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Inside, names in Python modules and classes have other values, for the whole process."""
    before = [(home, name, vars(home).get(name, _INHERITED)) for home, name, _ in others]
    for home, name, value in others:
        setattr(home, name, value)
    try:
        yield
    finally:
        for home, name, value in before:
            if value is _INHERITED:
                delattr(home, name)
            else:
                setattr(home, name, value)


def kernels_of(model: nn.Module) -> dict[str, str]:
    """Kernel -> its package, for the kernels that the code of `model` calls if they can run."""
    return {kernel: package for home in homes(model) for _, _, kernel, package in _kernels(home) if package}


def homes(model: nn.Module) -> list[ModuleType]:
    """The Python modules in which the classes of `model` are defined."""
    names = {each.__module__: None for cls in {type(module) for module in model.modules()} for each in cls.__mro__}
    return [sys.modules[name] for name in names if name in sys.modules and name.partition(".")[0] != "torch"]


def _kernels(home: ModuleType) -> Iterator[tuple[str, Any, str, str]]:
    """(name, value, kernel, package) of each function that may be a kernel; package is '' if it is not installed."""
    for name, value in list(vars(home).items()):
        wrapper = _wrapper(value)
        if wrapper is not None:
            known = inspect.getclosurevars(wrapper).nonlocals
            kernel = str(known.get("func_name", name))
            yield name, value, kernel, str(known.get("package", "")) if known.get("is_new_implementation") else ""


@functools.lru_cache(maxsize=256)
def is_kernel(value: Any) -> bool:
    """Whether `value` calls a kernel, or the stand-in for a kernel in a traced step, and not a plain function."""
    wrapper = _wrapper(value)
    if wrapper is None:
        return getattr(value, STANDS_FOR_KERNEL, False)
    return bool(inspect.getclosurevars(wrapper).nonlocals.get("is_new_implementation"))


def _wrapper(value: Any) -> Any:
    """The function that calls a kernel or, where its package is missing, the plain function ``__wrapped__``."""
    if isinstance(value, nn.Module) and hasattr(value, "kernel_layer_name"):  # as the package `kernels` makes it
        forward: Callable[..., Any] = type(value).forward
        value = inspect.getclosurevars(forward).nonlocals.get("func")
    is_one = isinstance(value, FunctionType) and value.__globals__.get("__name__") == _DECORATORS
    return value if is_one and hasattr(value, "__wrapped__") else None
