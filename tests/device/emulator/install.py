"""Makes the emulated device the CUDA device of this process; imported before anything imports torch."""

from __future__ import annotations

import contextlib

from tests.device.emulator.build import load

_LIBRARY = load()  # before torch, which the imports below need

with contextlib.suppress(ImportError):  # before torch has CUDA, or bitsandbytes would look for its CUDA code
    import bitsandbytes  # noqa: F401

from tests.device.emulator import launches, surface  # noqa: E402
from tests.device.emulator.counting import Count, Meter  # noqa: E402

_METER = Meter(_LIBRARY)
counting = _METER.counting
surface.install(_LIBRARY, _METER)
launches.install(_METER)

__all__ = ["Count", "counting"]
