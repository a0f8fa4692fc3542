"""Mistakes in a command line are told before torch is imported, which takes seconds."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

_RUN = "import sys; from memopt.cli.main import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"


@pytest.mark.parametrize(
    "line",
    [
        "report ./missing",
        "report 'no hub id'",
        "report {here} --nope",
        "report {here} --recipe nope",
        "report {here} --html {here}/config.json",
        "report {here} --set norms.fold",
        "report {here} --set ''",
        "report {here} --set checkpointing.n=0 --budget 24GiB",
        "report {here} --gpu ''",
        "patch ./missing",
        "patch one/word/more",
        "patch {here} --recipe nope",
        "patch {here} --out {here}",
        "patch {here} --inputs missing.pt",
        "report {here} --inputs missing.pt",
        "verify ./missing",
        "verify {here}",
        "unpatch ./missing",
        "unpatch {here}",
    ],
)
def test_a_mistake_is_reported_without_torch(line: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    words = shlex.split(line.format(here=tmp_path))
    done = subprocess.run([sys.executable, "-c", _RUN, *words], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False"]
    assert "error: " in done.stderr
