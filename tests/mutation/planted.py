"""What a planted fault is, and the list in which the modules of faults enter theirs.

Beside `tests.mutation.faults`, which plants faults in the sources to try the test suite, these are planted in patched
folders and patched models to try `memopt verify`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from memopt.patches.checks import Level, Status
from tests.mutation.models import DTYPES, PLANTED_IN

#: Sizes of faults that have one; the smallest only where weights are in fp32.
SIZES = (0.1, 0.01, 0.001)

#: Damages a folder and returns what a failing check has to name: one of these texts.
Damage = Callable[..., str | tuple[str, ...]]
#: Plants a fault at a site, for as long as the context lasts.
Plant = Callable[..., AbstractContextManager[Any]]


@dataclass(frozen=True)
class Fault:
    """One plausible mistake."""

    name: str
    kind: str
    """Where it is: ``files``, ``norms``, ..."""
    levels: tuple[Level, ...]
    """The levels that run, in this order, until one fails. The first one is expected to."""
    architectures: tuple[str, ...]
    sizes: tuple[float | None, ...]
    damage: Damage | None = None
    plant: Plant | None = None
    recipe: str = "exact"
    """A name, and keys to change (KEY=VALUE) behind it."""
    sides: bool = False
    """The original has tokenizer files and others."""
    statuses: tuple[Status, ...] = ("fail",)
    """One check that names the place has one of these."""
    may_refuse: bool = False
    """Verify may also end with an error that names the place."""
    dtypes: tuple[str, ...] = tuple(DTYPES)
    """Dtypes of folders in which the fault acts."""


FAULTS: list[Fault] = []


def in_folder(
    kind: str, name: str, *architectures: str, sized: bool = False, **more: Any
) -> Callable[[Damage], Damage]:
    """Enter a function damage(copy[, size]) -> place; the level ``weights`` has to see what it does."""

    def enter(damage: Damage) -> Damage:
        sizes = SIZES if sized else (None,)
        FAULTS.append(Fault(name, kind, ("weights",), architectures or PLANTED_IN, sizes, damage=damage, **more))
        return damage

    return enter


def in_modules(
    kind: str,
    name: str,
    *architectures: str,
    sized: bool | tuple[float, ...] = False,
    levels: tuple[Level, ...] = ("gradient", "memory", "forward"),
    recipe: str = "exact",
    dtypes: tuple[str, ...] = tuple(DTYPES),
) -> Callable[[Plant], Plant]:
    """Enter a context manager plant(site[, size])."""

    def enter(plant: Plant) -> Plant:
        sizes = SIZES if sized is True else sized or (None,)
        where = architectures or PLANTED_IN
        FAULTS.append(Fault(name, kind, levels, where, sizes, plant=plant, recipe=recipe, dtypes=dtypes))
        return plant

    return enter
