"""Where the tests of this folder run: on a GPU as the kernels really run, or in Triton's interpreter on CPU tensors.

    TRITON_INTERPRET=1 pytest tests/triton      interpreter; needs no GPU
    TRITON_INTERPRET=1 pytest -p tests.device.emulator.plugin tests/triton     interpreter, on the emulated CUDA device
    pytest tests/triton                         a CUDA or ROCm device

Triton reads the variable while it decorates a kernel, so one process does one of the two. Without a GPU and without the
variable every module here is skipped before it is imported.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from memopt.kernels.base.launch import LaunchConfig, override
from tests.skipped import skipped_module
from tests.triton.memory import RedZones

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
#: Where the tests put their tensors. The emulated device runs interpreted kernels on its own.
DEVICE = "cpu" if INTERPRETED and "tests.device.emulator.install" not in sys.modules else "cuda"


def _reason_to_skip() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not INTERPRETED and not torch.cuda.is_available():
        return "no GPU; run the kernels in Triton's interpreter with: TRITON_INTERPRET=1 pytest tests/triton"
    return None


REASON = _reason_to_skip()
if INTERPRETED and REASON is None:
    from tests.triton import bf16, members

    bf16.install()
    members.install()


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return skipped_module(module_path, parent, REASON) if REASON else None


@pytest.fixture
def red_zones() -> Iterator[RedZones]:
    """Borders around every tensor that is allocated uninitialized while the test runs; checked when it ends."""
    with RedZones() as zones:
        yield zones


@pytest.fixture
def short_tiles() -> Iterator[None]:
    """Tiles of 4 x 32 in the norms' kernels, so that rows of 33 elements are long."""
    with ExitStack() as stack:
        for kernel in ("norm_forward", "norm_affine", "norm_backward"):
            stack.enter_context(override(kernel, LaunchConfig(rows=4, block=32, num_warps=1)))
        yield
