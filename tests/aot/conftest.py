"""Tests of the compiled kernels need Triton's compiler, and no GPU: everything else they need comes in its wheel."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from tests.skipped import skipped_module


def _reason_to_skip() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "kernels are not compiled in Triton's interpreter; run without TRITON_INTERPRET: pytest tests/aot"
    return None


REASON = _reason_to_skip()

if REASON is None:
    from tests.aot.binary_cache import compile_cached
    from tools.kernels import aot

    aot.compile_kernel = compile_cached


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return skipped_module(module_path, parent, REASON) if REASON else None
