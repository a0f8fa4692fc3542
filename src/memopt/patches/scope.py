"""Modules inside which outputs that can be recomputed are kept as handles (`memopt.saved`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from memopt.patches.swap import steps_aside, swap_forward, wraps_any_forward
from memopt.saved.compressible import Compression
from memopt.saved.scope import RecomputeScope


@dataclass(frozen=True)
class ScopeRewrite:
    """What a scope does."""

    families: frozenset[str]
    """Which families of rules hold inside."""
    compression: Compression | None = None
    """How saved tensors are stored that are not recomputed; None: as they are."""

    def around(self, *args: Any, **kwargs: Any) -> RecomputeScope:
        """The scope for one call of the module with these arguments."""
        if self.compression is None:
            return RecomputeScope(self.families)
        given = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        hidden = next((tensor for tensor in given if tensor.is_floating_point()), None)
        return RecomputeScope(self.families, self.compression, hidden)


def patch_scope(module: nn.Module, scope: ScopeRewrite) -> None:
    """Make `module` run inside a scope. Where checkpointing wraps the module's forward, the scope is inside it.

    Raises:
        ValueError: the module cannot be swapped.
    """
    swap_forward(module, _forward, scope)


@wraps_any_forward
def _forward(stock: Callable[..., Any], rewrite: ScopeRewrite, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if steps_aside():
        return stock(module, *args, **kwargs)
    with rewrite.around(*args, **kwargs):
        return stock(module, *args, **kwargs)
