"""Modules whose forward runs inside function modes, which see the functions that it calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import nn

from memopt.patches.swap import is_swapped, restore_forward, swap_forward, swap_state, wraps_any_forward

#: (module, arguments of one call) -> the context around that call.
Mode = Callable[[nn.Module, Sequence[Any]], AbstractContextManager[object]]


@dataclass(frozen=True)
class FunctionsRewrite:
    """What such a module knows."""

    modes: tuple[Mode, ...]
    """Outermost first."""


def patch_functions(module: nn.Module, mode: Mode) -> None:
    """Let `module` run inside `mode`, and inside the modes that it already has.

    Raises:
        ValueError: the module cannot be swapped.
    """
    swap_forward(module, _forward, FunctionsRewrite((*without_modes(module), mode)))


def has_modes(module: nn.Module) -> bool:
    """Whether `module` runs inside modes, and is not rewritten otherwise."""
    return is_swapped(module) and isinstance(swap_state(module), FunctionsRewrite)


def without_modes(module: nn.Module) -> tuple[Mode, ...]:
    """The modes that `module` ran inside, for a rewrite in the place of this one."""
    if not has_modes(module):
        return ()
    modes: tuple[Mode, ...] = swap_state(module).modes  # type: ignore[attr-defined]
    restore_forward(module)
    return modes


@wraps_any_forward
def _forward(stock: Callable[..., Any], rewrite: FunctionsRewrite, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return run_inside(rewrite.modes, stock, module, *args, **kwargs)


def run_inside(modes: tuple[Mode, ...], run: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """``run(module, *args, **kwargs)`` inside `modes`."""
    if not modes:
        return run(module, *args, **kwargs)
    with modes[0](module, (*args, *kwargs.values())):  # a stack of contexts would break a graph that is being compiled
        return run_inside(modes[1:], run, module, *args, **kwargs)
