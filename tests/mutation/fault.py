"""A fault that `tests.mutations` plants: one plausible mistake, and the tests that must notice it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One change of the sources that makes them wrong."""

    name: str
    old: str
    """Text that stands once in src."""
    new: str
    tests: tuple[str, ...]
    """Arguments of pytest: what has to fail."""
