"""Give one module instance another forward, and take it back.

The instance's ``__class__`` becomes a subclass of its own class that differs in `forward` alone. Parameters, buffers,
hooks, training flag, device, `isinstance`, class name, deepcopy and state dict keys stay as they are; other instances
of the class, and other models, are not touched.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from torch import nn

_ORIGINAL = "_memopt_original_class"
_STATE = "_memopt"

#: forward(original_forward, state, module, *args, **kwargs)
Forward = Callable[..., Any]

_classes: dict[tuple[type[nn.Module], Forward], type[nn.Module]] = {}


def swap_forward(module: nn.Module, forward: Forward, state: object) -> None:
    """Make `module` run ``forward(stock_forward, state, module, ...)``; `state` is small plain data kept on it.

    Raises:
        ValueError: the module is already swapped, or its forward was replaced on the instance.
    """
    if is_swapped(module):
        raise ValueError("it is already patched")
    if "forward" in vars(module):
        raise ValueError("its forward was replaced on the instance; patch the model before that tool wraps it")
    module.__class__ = _subclass(type(module), forward)
    module.__dict__[_STATE] = state


def restore_forward(module: nn.Module) -> None:
    """Undo :func:`swap_forward`."""
    module.__class__ = getattr(type(module), _ORIGINAL)
    del module.__dict__[_STATE]


def is_swapped(module: nn.Module) -> bool:
    return _STATE in vars(module) and hasattr(type(module), _ORIGINAL)


def swap_state(module: nn.Module) -> object:
    """The state that :func:`swap_forward` was given."""
    return vars(module)[_STATE]


def original_class(module: nn.Module) -> type[nn.Module]:
    """The module's class before the swap (its class, when it was not swapped)."""
    cls: type[nn.Module] = getattr(type(module), _ORIGINAL, type(module))
    return cls


def _subclass(cls: type[nn.Module], forward: Forward) -> type[nn.Module]:
    key = (cls, forward)
    if key not in _classes:
        stock = cls.forward

        @functools.wraps(stock)
        def patched(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return forward(stock, vars(self)[_STATE], self, *args, **kwargs)

        def reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
            # The class has no importable name of its own: pickles say how to make it again.
            return _rebuild, (cls, forward), dict(vars(self))

        # The stock name stays: wrapping policies, device maps and printed models go by it.
        body = {
            "forward": patched,
            "__reduce_ex__": reduce,
            _ORIGINAL: cls,
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
        }
        _classes[key] = types.new_class(cls.__name__, (cls,), exec_body=lambda namespace: namespace.update(body))
    return _classes[key]


def _rebuild(cls: type[nn.Module], forward: Forward) -> nn.Module:
    """An empty instance, whose state the unpickler (or deepcopy) fills in."""
    swapped = _subclass(cls, forward)
    module: nn.Module = swapped.__new__(swapped)
    return module
