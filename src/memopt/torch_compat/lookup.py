"""Looks up private names of PyTorch, and records the names that this PyTorch lacks."""

from __future__ import annotations

import functools
import pkgutil
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from memopt.errors import first_of


@dataclass(frozen=True)
class Missing:
    """A name that this PyTorch lacks."""

    name: str
    """Its full path, e.g. ``torch._C._storage_Use_Count``."""
    lost: str
    """The loss without it, as a clause: "views are not copied out of larger storages"."""


#: Most names that a warning lists for one loss.
_SHOWN = 4

_missing: dict[str, Missing] = {}
_names: dict[str, None] = {}


def find(name: str, otherwise: Any, lost: str) -> Any:
    """The object of the dotted `name`. If it does not exist: `otherwise`, and :func:`missing` lists the loss `lost`."""
    _names[name] = None
    try:
        return resolve(name)
    except (ImportError, AttributeError):
        _missing[name] = Missing(name, lost)
        return otherwise


def is_found(name: str) -> bool:
    """Whether :func:`find`, which was called with `name` before, found it."""
    return name not in _missing


def resolve(name: str) -> Any:
    """The object of the dotted `name`; attributes of ``torch.nn.Module`` are read from an instance. Raises an
    ImportError if a module on the path does not exist, and an AttributeError if something else does not."""
    owner, _, attribute = name.rpartition(".")
    if owner == "torch.nn.Module":
        return getattr(torch.nn.Module(), attribute)
    return pkgutil.resolve_name(name)


def names() -> tuple[str, ...]:
    """Every private name that memopt looks for, found or not."""
    return tuple(_names)


def missing() -> tuple[Missing, ...]:
    """The private names that this PyTorch lacks; empty if no mechanism is off."""
    return tuple(_missing.values())


@functools.cache
def warn_once_of_missing() -> None:
    """Warn, once a process, of mechanisms that are off because this PyTorch lacks names."""
    if not _missing:
        return
    by_loss: dict[str, list[str]] = {}
    for entry in _missing.values():
        by_loss.setdefault(entry.lost, []).append(entry.name)
    losses = "; ".join(f"{lost} ({first_of(names, _SHOWN)})" for lost, names in by_loss.items())
    warnings.warn(
        f"memopt saves less with PyTorch {torch.__version__}, which lacks names that it uses; gradients are not "
        f"affected: {losses}.",
        stacklevel=3,
    )
