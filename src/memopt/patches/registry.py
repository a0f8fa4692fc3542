"""All patches: each is a folder of `patches/`, whose `patch.py` holds the registered object. No torch is imported."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TypeVar

import memopt.patches
from memopt.patches.base import Patch, Rows
from memopt.walk.probes.brought import PROBES

C = TypeVar("C")
_registered: dict[str, Patch] = {}
_watchers: list[Callable[[], None]] = []


@cache
def patches() -> tuple[Patch, ...]:
    """All patches, each behind the patches in its `after`: the order of rows, decisions and rewrites."""
    known = _shipped() | _registered
    ordered: dict[str, Patch] = {}

    def place(patch: Patch, behind: tuple[str, ...] = ()) -> None:
        if patch.name in behind:
            raise ValueError(f"patches wait for one another: {' -> '.join((*behind, patch.name))}")
        for name in patch.after:
            if name in known:  # any patch may be missing from the package
                place(known[name], (*behind, patch.name))
        ordered.setdefault(patch.name, patch)

    for patch in known.values():
        place(patch)
    return tuple(ordered.values())


def having(capability: type[C]) -> tuple[C, ...]:
    """The patches that inherit `capability`, a class of `memopt.patches.capabilities`."""
    return tuple(patch for patch in patches() if isinstance(patch, capability))


def rows() -> dict[str, Rows]:
    """Kind -> wording of its rows, with the actions of every patch that decides rows of that kind."""
    found: dict[str, Rows] = {}
    for its in (patch.rows for patch in patches() if patch.rows is not None):
        first = found.setdefault(its.kind, its)
        found[its.kind] = replace(first, actions={**first.actions, **its.actions})
    return found


def register(package: str) -> Patch:
    """Add a patch from a folder of another project, e.g. ``"my_project.my_patch"``. Raises a ValueError if another
    patch has that name, or has rules under that recipe key which this one does not extend."""
    patch = _patch_of(package)
    for other in patches():
        if other.name == patch.name or _has_key_of(patch, other):
            raise ValueError(f"'{patch.name}' of {package}: the patch '{other.name}' has its name or its recipe key")
    _registered[patch.name] = patch
    _changed()
    return patch


def _patch_of(package: str) -> Patch:
    """The registered object of a folder; if the folder has a ``probe.py``, the walk will run it."""
    patch: Patch = import_module(f"{package}.patch").PATCH
    if find_spec(f"{package}.probe") is not None:
        PROBES.add(f"{package}.probe")
    return patch


def _has_key_of(patch: Patch, other: Patch) -> bool:
    """Whether both patches have rules under one key, and the rules of `patch` do not extend the rules of `other`."""
    if patch.rules is None or other.rules is None or issubclass(patch.rules, other.rules):
        return False
    return patch.rules.key == other.rules.key


def unregister(patch: Patch) -> None:
    """Undo :func:`register`."""
    del _registered[patch.name]
    PROBES.discard(f"{type(patch).__module__.removesuffix('.patch')}.probe")
    _changed()


def watch(changed: Callable[[], None]) -> None:
    """Call `changed` now, and whenever patches are added or removed."""
    _watchers.append(changed)
    changed()


@cache
def _shipped() -> dict[str, Patch]:
    folders = sorted(module.name for module in pkgutil.iter_modules(memopt.patches.__path__) if module.ispkg)
    found = {}
    for folder in folders:
        try:
            found[folder] = _patch_of(f"{memopt.patches.__name__}.{folder}")
        except ModuleNotFoundError as missing:
            if str(missing.name).rpartition(".")[0] != memopt.patches.__name__:
                raise
            # This patch extends another one whose folder is missing, so it is left out too.
    return found


def _changed() -> None:
    patches.cache_clear()
    for changed in _watchers:
        changed()
