"""The writer is killed and meets errors at random moments: no folder looks complete and is not, and nothing is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(kills: int, errors: int, tmp_path: Path) -> dict[str, object]:
    command = [sys.executable, "-m", "tests.checkpoint.faults", "--kills", str(kills), "--errors", str(errors)]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    print(done.stdout)
    result: dict[str, object] = json.loads(done.stdout)
    return result


def test_a_dozen_kills_and_errors_leave_nothing_half_done(tmp_path: Path) -> None:
    assert run(12, 7, tmp_path)["wrong"] == []


@pytest.mark.slow
def test_two_hundred_kills_and_a_hundred_errors_leave_nothing_half_done(tmp_path: Path) -> None:
    assert run(200, 100, tmp_path)["wrong"] == []
