"""Test modules that are skipped as a whole, without being imported: what they import may not be there."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest


class SkippedModule(pytest.Module):
    reason: str

    def collect(self) -> Iterable[pytest.Item]:
        raise pytest.skip.Exception(self.reason, allow_module_level=True)


def skipped_module(path: Path, parent: pytest.Collector, reason: str) -> SkippedModule:
    """What `pytest_pycollect_makemodule` gives back for a module that must not run, because of `reason`."""
    module: SkippedModule = SkippedModule.from_parent(parent, path=path)
    module.reason = reason
    return module
