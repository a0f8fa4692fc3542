"""Affines of folded norms: an identity in buffers, which are neither trained nor decayed and keep their names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from memopt.walk.sites import NormSite

#: (name, requires_grad) of each identity parameter that became a buffer.
Frozen = tuple[tuple[str, bool], ...]


@contextlib.contextmanager
def freezing(module: nn.Module, folded: NormSite | None) -> Iterator[Frozen]:
    """Turn the affine of a `folded` norm into persistent buffers if it is the identity; undone on a ValueError."""
    frozen = _freeze(module, folded) if folded is not None else ()
    try:
        yield frozen
    except ValueError:
        thaw(module, frozen)
        raise


def _freeze(module: nn.Module, site: NormSite) -> Frozen:
    weight, bias = local_name(site.weight), local_name(site.bias)
    if weight is not None and not bool((getattr(module, weight) == 1 - site.offset).all()):
        return ()
    if bias is not None and bool(getattr(module, bias).any()):
        return ()
    names = [name for name in (weight, bias) if name is not None]
    frozen = tuple((name, getattr(module, name).requires_grad) for name in names)
    for name in names:
        tensor = getattr(module, name).detach()
        delattr(module, name)
        module.register_buffer(name, tensor, persistent=True)
    return frozen


def thaw(module: nn.Module, frozen: Frozen) -> None:
    """Turn the `frozen` buffers of `module` into parameters again."""
    for name, requires_grad in frozen:
        tensor = getattr(module, name)
        delattr(module, name)
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=requires_grad))


def local_name(parameter: str | None) -> str | None:
    """The last part of a parameter's dotted name."""
    return None if parameter is None else parameter.rpartition(".")[2]
