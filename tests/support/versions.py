"""Tests whose numbers are those of a newer PyTorch or transformers than the oldest that memopt supports."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from packaging.version import Version


def needs(package: str, least: str, reason: str) -> pytest.MarkDecorator:
    """Skips with an older `package`, which `reason` tells of; `least` is the oldest that was seen to do otherwise."""
    return pytest.mark.skipif(Version(version(package)) < Version(least), reason=f"{package} before {least} {reason}")
