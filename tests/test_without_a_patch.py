"""The package without one of its patches: everything else is there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import memopt
from tests.factories import tiny_model

SOURCE = Path(memopt.__file__).parent
GONE = "dropout"
#: Runs in the copy: every module but the tools, which list all launches, and the kernels, which need Triton.
IMPORT_ALL = """
import pkgutil, sys, memopt
names = [m.name for m in pkgutil.walk_packages(memopt.__path__, "memopt.") if m.name != "memopt.__main__"]
for name in names:
    if ".tools" not in name and not name.endswith("_triton"):
        __import__(name)
assert sys.argv[1] in memopt.__file__, memopt.__file__
assert not [name for name in sys.modules if name.startswith("memopt") and "dropout" in name]
"""
COMMAND = "from memopt.cli.main import run; run()"


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("without")
    shutil.copytree(SOURCE, root / "src" / "memopt", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(SOURCE.parents[1] / "configs" / "recipes", root / "configs" / "recipes")
    for room in ("patches", "kernels"):
        shutil.rmtree(root / "src" / "memopt" / room / GONE)
    return root


def run(copy: Path, code: str, *arguments: object) -> str:
    environment = {**os.environ, "PYTHONPATH": str(copy / "src")}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=copy, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_module_can_be_imported(copy: Path) -> None:
    run(copy, IMPORT_ALL, copy)


def test_a_model_is_patched_verified_and_reported(copy: Path) -> None:
    tiny_model("bert", hidden_dropout_prob=0.1).save_pretrained(copy / "model")
    table = run(copy, COMMAND, "patch", copy / "model", "--out", copy / "out")
    assert "norms: 5 folded" in table or "folded" in table
    assert GONE not in "".join(line for line in table.splitlines() if ": " in line)
    assert "all checks passed" in run(copy, COMMAND, "verify", copy / "out")
    assert "saved for backward" in run(copy, COMMAND, "report", copy / "out", "--seq", 32)


def test_its_key_is_unknown_to_recipes(copy: Path) -> None:
    assert f"{GONE}s" not in run(copy, COMMAND, "recipes", "exact")
