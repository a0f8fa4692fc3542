"""Every patch there is: one folder of `patches/` each, whose `patch.py` holds the registered object. No torch."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from functools import cache
from importlib import import_module

import memopt.patches
from memopt.patches.base import Patch

_registered: dict[str, Patch] = {}
_watchers: list[Callable[[], None]] = []


@cache
def patches() -> tuple[Patch, ...]:
    """All patches, each behind those that its `after` names: the order of rows, decisions and rewrites."""
    known = _shipped() | _registered
    ordered: dict[str, Patch] = {}

    def place(patch: Patch, behind: tuple[str, ...] = ()) -> None:
        if patch.name in behind:
            raise ValueError(f"patches wait for one another: {' -> '.join((*behind, patch.name))}")
        for name in patch.after:
            if name in known:  # the package works without any one of them
                place(known[name], (*behind, patch.name))
        ordered.setdefault(patch.name, patch)

    for patch in known.values():
        place(patch)
    return tuple(ordered.values())


def register(package: str) -> Patch:
    """Add the patch of a folder that stands somewhere else, e.g. ``"my_project.my_patch"``.

    Raises:
        ValueError: there is a patch of that name, or one with that key of a recipe.
    """
    patch: Patch = import_module(f"{package}.patch").PATCH
    for other in patches():
        if other.name == patch.name or (patch.key is not None and other.key == patch.key):
            raise ValueError(f"'{patch.name}' of {package}: the patch '{other.name}' has its name or its recipe key")
    _registered[patch.name] = patch
    _changed()
    return patch


def unregister(patch: Patch) -> None:
    """Take back :func:`register`."""
    del _registered[patch.name]
    _changed()


def watch(changed: Callable[[], None]) -> None:
    """Call `changed` now, and whenever the patches are others."""
    _watchers.append(changed)
    changed()


@cache
def _shipped() -> dict[str, Patch]:
    folders = sorted(module.name for module in pkgutil.iter_modules(memopt.patches.__path__) if module.ispkg)
    found = {}
    for folder in folders:
        # A folder without a registered object is code that several patches use.
        home = f"{memopt.patches.__name__}.{folder}"
        if any(module.name == "patch" for module in pkgutil.iter_modules(import_module(home).__path__)):
            found[folder] = import_module(f"{home}.patch").PATCH
    return found


def _changed() -> None:
    patches.cache_clear()
    for changed in _watchers:
        changed()
