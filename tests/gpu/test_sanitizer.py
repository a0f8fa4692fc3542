"""The kernels under NVIDIA's compute-sanitizer, which sees what no result shows: accesses out of bounds, data races."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SANITIZER = shutil.which("compute-sanitizer")
#: What the sanitizer gives back where it finds something; the script's own failures are 1.
FOUND = 86

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.real_device("accesses and races of compiled kernels"),
    pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer (CUDA toolkit) is not on PATH"),
]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_no_kernel_does_what_the_sanitizer_forbids(tool: str) -> None:
    root = Path(__file__).parents[2]
    command = [str(SANITIZER), "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "5"]
    # Without PyTorch's cache every tensor is an allocation of its own, whose end the sanitizer knows.
    environment = os.environ | {
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root), os.environ.get("PYTHONPATH", "")]),
    }
    run = subprocess.run(
        [*command, sys.executable, str(root / "tests/gpu/sanitized.py")],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, f"{run.stdout[-4000:]}\n{run.stderr[-4000:]}"
