"""The emulated device under pytest: pytest -p tests.device.emulator.plugin ...

Tests marked `real_device(why)` need what it cannot tell, and are skipped by that reason.
"""

from __future__ import annotations

import os

import pytest

from tests.device.emulator.build import CannotBuild

REASON: str | None = None
try:
    import tests.device.emulator.install  # noqa: F401
except CannotBuild as error:
    if os.environ.get("CI"):
        raise
    REASON = f"no emulated device: {error}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        marker = item.get_closest_marker("real_device")
        if REASON or marker:
            reason = REASON or f"the emulated device cannot tell: {marker.args[0]}"  # type: ignore[union-attr]
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_report_header() -> str:
    from tests.device.emulator.launches import INTERPRETED

    return f"device: {REASON or 'emulated'}; Triton kernels are {'interpreted' if INTERPRETED else 'left out'}"
