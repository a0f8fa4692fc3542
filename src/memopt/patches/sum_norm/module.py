"""Post-norm modules, norm(dense(hidden) + residual), whose norm reads both terms itself, so the sum is never stored.

The children stay: dense and the dropout are called as in the stock forward, so adapters, quantised linears and hooks on
them work. The norm is not called if memopt has patched it and it has no hooks; its parameters are read instead. Without
the kernel, large sums are computed in parts, and for small ones the stock forward runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memopt.kernels.base.device import runs_triton
from memopt.kernels.base.pieces import parts_of
from memopt.patches.norm.module import norm_of_sum
from memopt.patches.reads import observed_reads
from memopt.patches.scope import ScopeRewrite, run_in_scope
from memopt.patches.sum_norm.site import SumNormSite
from memopt.patches.swap import steps_aside, swap_forward


@dataclass(frozen=True)
class SumNormRewrite:
    """State of a patched post-norm module: the names of its children and arguments, and its scope."""

    site: SumNormSite
    scope: ScopeRewrite | None
    """The scope in which the module runs; None if it has no scope of its own."""


def patch_sum_norm(module: nn.Module, site: SumNormSite, scope: ScopeRewrite | None) -> None:
    """Make `module` pass both terms of its sum to its norm."""
    stand_ins = {name: nn.Identity() for name in (site.dense, site.between, site.norm) if name is not None}
    x = torch.ones(2, 3, device="cpu")
    reads = observed_reads(module, lambda alone: alone.forward(x, x), children=stand_ins)
    swap_forward(module, _forward, SumNormRewrite(site, scope), reads)


def _forward(stock: Callable[..., Any], rewrite: SumNormRewrite, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if steps_aside():
        return stock(module, *args, **kwargs)
    if rewrite.scope is None:
        return _run(stock, rewrite.site, module, *args, **kwargs)
    return run_in_scope(rewrite.scope, functools.partial(_run, stock, rewrite.site), module, *args, **kwargs)


def _run(stock: Callable[..., Any], site: SumNormSite, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    given = _bound(site, args, kwargs)
    # The sum has the shape, dtype and device of the residual.
    if given is None or not (runs_triton(given[1]) or parts_of(given[1])):
        return stock(module, *args, **kwargs)
    hidden, residual = given
    children = module._modules
    for name in (site.dense, site.between):
        if name is not None:
            child = children[name]
            assert child is not None
            hidden = child(hidden)
    norm = children[site.norm]
    assert norm is not None
    return norm_of_sum(norm, hidden, residual)


def _bound(site: SumNormSite, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """(hidden, residual); None for a call with other arguments than these two tensors."""
    if kwargs:
        given = dict(zip(site.arguments, args, strict=False)) | kwargs
        if len(args) + len(kwargs) != 2 or given.keys() != set(site.arguments):
            return None
        args = tuple(given[name] for name in site.arguments)
    if len(args) != 2:
        return None
    hidden, residual = args[1 - site.residual], args[site.residual]
    return (hidden, residual) if isinstance(hidden, Tensor) and isinstance(residual, Tensor) else None
