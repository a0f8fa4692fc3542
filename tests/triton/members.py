"""Lists the members of Triton's modules once, not at every launch: a fifth of a small kernel's time; for tests only.

The interpreter replaces builtins of `triton.language` for the time of a launch and puts them back, so that it finds the
same members each time.
"""

from __future__ import annotations

import functools
import inspect
import types

from triton.runtime import interpreter


def install() -> None:
    """Replace the interpreter's `inspect.getmembers`; a second call changes nothing."""
    if interpreter.inspect is inspect:
        once = functools.cache(inspect.getmembers)
        interpreter.inspect = types.SimpleNamespace(**vars(inspect) | {"getmembers": once})
