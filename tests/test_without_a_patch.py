"""The package without one of its patches: everything else is there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import memopt
from tests.factories import tiny_model
from tests.support.processes import run_code

SOURCE = Path(memopt.__file__).parent
GONE = "dropout"
#: Runs in the copy, in one process: imports every module but the tools, which list all launches, the kernels, which
#: need Triton, and the plugins of trainers that are not installed; then runs commands. Prints the names of modules,
#: then exit code and output of each command, as JSON.
EVERYTHING = """
import contextlib, gc, io, json, pkgutil, sys, memopt
names = [m.name for m in pkgutil.walk_packages(memopt.__path__, "memopt.") if m.name != "memopt.__main__"]
for name in names:
    if ".tools" in name or name.endswith("_triton"):
        continue
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        if name not in ("memopt.axolotl", "memopt.integrations.lightning") or error.name.startswith("memopt"):
            raise
print(json.dumps([memopt.__file__, [name for name in sys.modules if name.startswith("memopt")]]))
from memopt.cli.main import main
gc.freeze()
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = main(arguments)
    print(json.dumps([code, output.getvalue()]))
"""
COMMANDS = {
    "patch": ["patch", "model", "--out", "out"],
    "verify": ["verify", "out"],
    "report": ["report", "out", "--seq", "32", "-v"],
    "recipes": ["recipes", "exact"],
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("without")
    shutil.copytree(SOURCE, root / "src" / "memopt", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(SOURCE.parents[1] / "configs" / "recipes", root / "configs" / "recipes")
    for room in ("patches", "kernels"):
        shutil.rmtree(root / "src" / "memopt" / room / GONE)
    tiny_model("bert", hidden_dropout_prob=0.1).save_pretrained(root / "model")
    return root


@pytest.fixture(scope="module")
def lines(copy: Path) -> list[str]:
    """What `EVERYTHING` prints in the copy."""
    ran = run_code(EVERYTHING, json.dumps([*COMMANDS.values()]), folder=copy, path=[copy / "src"])
    assert ran.code == 0, ran.err
    return ran.out.splitlines()


@pytest.fixture(scope="module")
def outputs(lines: list[str]) -> dict[str, str]:
    """What each command printed; all of them exit with 0."""
    found = dict(zip(COMMANDS, map(json.loads, lines[1:]), strict=True))
    assert {name: code for name, (code, _) in found.items() if code} == {}, found
    return {name: output for name, (_, output) in found.items()}


def test_every_module_can_be_imported(copy: Path, lines: list[str]) -> None:
    package, modules = json.loads(lines[0])
    assert str(copy) in package
    assert len(modules) > 100
    assert [name for name in modules if GONE in name] == []


def test_a_model_is_patched_verified_and_reported(outputs: dict[str, str]) -> None:
    assert "folded" in outputs["patch"]
    assert GONE not in "".join(line for line in outputs["patch"].splitlines() if ": " in line)
    assert "all checks passed" in outputs["verify"]
    assert "saved for backward" in outputs["report"]


def test_its_key_is_unknown_to_recipes(outputs: dict[str, str]) -> None:
    assert f"{GONE}s" not in outputs["recipes"]
