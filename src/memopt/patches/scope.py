"""Modules inside which outputs that can be made again are kept as handles (`memopt.saved`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from memopt.patches.swap import restore_forward, steps_aside, swap_forward, wraps_any_forward
from memopt.saved.scope import RecomputeScope


@dataclass(frozen=True)
class ScopeRewrite:
    """Which families of rules a scope applies."""

    families: frozenset[str]


def patch_scope(module: nn.Module, families: frozenset[str]) -> None:
    """Make `module` run inside a scope. Where checkpointing wraps the module's forward, the scope is inside it.

    Raises:
        ValueError: the module cannot be swapped.
    """
    swap_forward(module, _forward, ScopeRewrite(families))


def unpatch_scope(module: nn.Module) -> None:
    """Undo :func:`patch_scope`."""
    restore_forward(module)


@wraps_any_forward
def _forward(stock: Callable[..., Any], rewrite: ScopeRewrite, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if steps_aside():
        return stock(module, *args, **kwargs)
    with RecomputeScope(rewrite.families):
        return stock(module, *args, **kwargs)
