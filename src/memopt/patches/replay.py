"""Modules without a formula in memopt (gated norms, activations with parameters, ...) that save only their inputs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from memopt.kernels.replay.function import replayed
from memopt.patches.identity import Frozen, freezing, thaw
from memopt.patches.reads import observed_reads
from memopt.patches.swap import Rewrite, is_watched, steps_aside, swap_forward
from memopt.recompute.pure import is_compound
from memopt.saved.whole import kept_whole
from memopt.walk.sites import NormSite


@dataclass(frozen=True)
class ReplayRewrite(Rewrite):
    """State of a replayed module."""

    parameters: tuple[str, ...]
    """Names of its own parameters when it was patched. A tool that computes one from others removes it."""
    by_rows: bool = False
    """Whether each row of its inputs alone gives its row of the output."""
    frozen: Frozen = ()

    def undo(self, module: nn.Module) -> None:
        thaw(module, self.frozen)


def patch_replay(module: nn.Module, norm: NormSite | None = None, *, folded: bool = False) -> None:
    """Make `module` save its inputs for backward and run its own forward again.

    Args:
        module: a module that was found to repeat its output when it runs again, with small parameters.
        norm: its site, if it is a norm.
        folded: whether the affine of the norm is folded into other weights.
    """
    with freezing(module, norm if folded else None) as frozen:
        by_rows = norm is not None and norm.by_rows
        rewrite = ReplayRewrite(tuple(_parameters(module)), by_rows, frozen)
        forward = _forward_whole if norm is None else _forward
        swap_forward(module, forward, rewrite, observed_reads(module, None))


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module._parameters.items() if parameter is not None}


def _forward(
    stock: Callable[..., Tensor], rewrite: ReplayRewrite, module: nn.Module, *args: Any, **kwargs: Any
) -> Tensor:
    parameters = _parameters(module)
    given = (*args, *kwargs.values())
    inputs = [value for value in given if isinstance(value, Tensor)]
    records = any(tensor.requires_grad for tensor in (*inputs, *parameters.values()))
    # A tensor inside a container would get no gradient.
    is_whole = tuple(parameters) == rewrite.parameters and not any(map(is_compound, given))
    if not records or not is_whole or steps_aside() or any(is_watched(child) for child in module.children()):
        return stock(module, *args, **kwargs)
    # Without the tensors: the function that runs again in backward must not keep them alive.
    template = [_SLOT if isinstance(value, Tensor) else value for value in given]
    # A copy of the attributes, so that changes before backward have no effect on it.
    run = functools.partial(_run, stock, module, dict(vars(module)), tuple(parameters), template, tuple(kwargs))
    return replayed(run, inputs, list(parameters.values()), by_rows=rewrite.by_rows)


def _forward_whole(stock: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """For an activation, whose slope may have a jump."""
    with kept_whole():
        return _forward(stock, *args, **kwargs)


_SLOT = object()


def _run(
    stock: Callable[..., Tensor],
    module: nn.Module,
    own: dict[str, Any],
    names: Sequence[str],
    template: Sequence[Any],
    keywords: Sequence[str],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
) -> Tensor:
    """The stock forward with these tensors in the place of its inputs and parameters."""
    alone = copy.copy(module)
    alone.__dict__ = own | {"_parameters": dict(own["_parameters"]) | dict(zip(names, parameters, strict=True))}
    tensors = iter(inputs)
    given = [next(tensors) if value is _SLOT else value for value in template]
    positional = len(given) - len(keywords)
    return stock(alone, *given[:positional], **dict(zip(keywords, given[positional:], strict=True)))
