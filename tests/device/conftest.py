"""Where the tests of this folder run: on the emulated device only, each subfolder in one of its two modes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.skipped import skipped_module

PLUGIN = "tests.device.emulator.plugin"
#: Folder -> whether it needs Triton's interpreter.
MODES = {"numeric": True, "quantised": True, "counted": False}


@pytest.fixture(autouse=True)
def uninitialized_memory_is_nan() -> None:
    """Nothing: the emulated device fills fresh memory itself, and what tests fill would count as launches."""


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    reason = _reason_to_skip(module_path)
    return skipped_module(module_path, parent, reason) if reason else None


def _reason_to_skip(path: Path) -> str | None:
    plugin = sys.modules.get(PLUGIN)
    if plugin is None:
        return "no emulated device in this process; run: make test-device"
    if plugin.REASON:
        return str(plugin.REASON)
    from tests.device.emulator.launches import INTERPRETED

    interpreted = MODES.get(path.parent.name)
    if interpreted is None or interpreted == INTERPRETED:
        return None
    return f"runs {'with' if interpreted else 'without'} TRITON_INTERPRET=1; run: make test-device"
