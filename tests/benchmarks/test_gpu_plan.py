"""The plan of the runs on a GPU: every part can be called, fits its time, and says what a machine lacks."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_plan
from benchmarks.gpu_plan import BENCHMARKS, CHECKS, LIMIT_MINUTES, PARTS, ROOT, Part
from benchmarks.measure import NO_GPU, Result

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
#: What of memopt's needs a machine for PyTorch often lacks.
ABSENT = ("pydantic", "pydantic_core", "annotated_types", "typing_inspection")


def test_every_part_is_short_and_writes_a_file_of_its_own() -> None:
    assert all(0 < part.minutes < LIMIT_MINUTES for part in PARTS)
    assert len({part.result for part in PARTS}) == len(PARTS)
    assert {part.kind for part in PARTS} == {CHECKS, BENCHMARKS}


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.result)
def test_every_part_names_a_module_and_files_that_exist(part: Part) -> None:
    assert importlib.util.find_spec(part.module) is not None
    for argument in part.arguments:
        path = argument.removeprefix("--ignore=")
        if path.startswith("tests/"):
            assert (ROOT / path).exists(), path


def test_every_test_of_a_device_is_in_one_part() -> None:
    models, sanitizer = set(gpu_plan._MODELS), gpu_plan._SANITIZER
    ignored = {argument.removeprefix("--ignore=") for argument in PARTS[1].arguments if argument.startswith("--ignore")}
    assert ignored == {*models, sanitizer}
    assert {path for path in PARTS[2].arguments if path.startswith("tests/")} == models
    assert PARTS[9].arguments == (sanitizer,)
    assert PARTS[1].arguments[-1] == f"not ({PARTS[10].arguments[-1]})"


def test_tests_that_need_most_of_a_gpus_memory_run_alone() -> None:
    words = PARTS[10].arguments[-1].split(" or ")
    huge = set()
    for path in (*(ROOT / "tests/gpu").glob("test_*.py"), *(ROOT / "tests/triton").glob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            is_test = isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
            if is_test and {"lazily_huge", "mem_get_info"} & {*map(_name, ast.walk(node))}:
                huge.add(node.name)
    assert len(huge) > 8
    assert {name for name in huge if not any(word in name for word in words)} == set()


def _name(node: ast.AST) -> str | None:
    return getattr(node, "id", getattr(node, "attr", None))


def test_the_list_names_each_parts_command_target_and_result(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_plan.main([]) == 0
    printed = capsys.readouterr().out
    for number, part in enumerate(PARTS, start=1):
        assert f"PART={number};" in printed
        assert f"benchmarks/results/{part.result}" in printed


def test_the_makefile_and_the_docs_name_the_plan() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in ("gpu-plan", "gpu-check", "gpu-bench", "gpu-wheels"):
        assert re.search(rf"^{target}:.* ## ", makefile, re.MULTILINE), target


def test_a_part_that_does_not_exist_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu_plan.main(["--run", str(len(PARTS) + 1)])
    assert ended.value.code == 2
    assert f"1 to {len(PARTS)}" in capsys.readouterr().err


def test_packages_are_those_of_pyproject_and_all_of_them_are_here() -> None:
    assert {"torch", "pydantic", "triton", "pytest", "huggingface_hub"} <= set(gpu_plan.needed())
    assert list(gpu_plan.lacking(sys.path)) == []


def test_a_missing_package_is_reported_in_one_line_with_the_way_to_bring_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_plan, "needed", lambda: ["torch", "no-such-package"])
    monkeypatch.setattr(gpu_plan, "WHEELS", tmp_path / "nothing")
    monkeypatch.setattr(gpu_plan, "ROOT", tmp_path)
    assert gpu_plan.main(["--run", "1", "--out", str(tmp_path)]) == gpu_plan.EXIT_CANNOT_RUN
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "lacks no-such-package" in said
    assert f"GPU_PYTHON_VERSION={sys.version_info.major}.{sys.version_info.minor}" in said


def test_packages_that_were_brought_along_are_used_where_the_interpreter_lacks_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    brought = tmp_path / "brought_along-1.0.dist-info"
    brought.mkdir()
    (brought / "METADATA").write_text("Metadata-Version: 2.1\nName: brought-along\nVersion: 1.0\n")
    monkeypatch.setattr(gpu_plan, "needed", lambda: ["torch", "brought-along"])
    monkeypatch.setattr(gpu_plan, "WHEELS", tmp_path)
    environment = gpu_plan.environment_of(dict(os.environ))
    assert isinstance(environment, dict), environment
    assert environment["PYTHONPATH"].endswith(str(tmp_path))


def test_triton_may_come_in_a_package_of_another_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_plan, "needed", lambda: ["triton"])
    assert list(gpu_plan.lacking([str(tmp_path)])) == ["triton"]
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").touch()
    (tmp_path / "pytorch_triton_rocm-3.6.dist-info").mkdir()
    assert list(gpu_plan.lacking([str(tmp_path)])) == []


#: A process in which modules of which `blocked` is true are not there.
FILTERED = """
import importlib.machinery, importlib.metadata as metadata, re, sys
class Filtered(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if blocked(name.partition(".")[0]) else super().find_spec(name, path, target)
sys.meta_path = [Filtered if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path]
"""


@pytest.mark.rotates(3)
def test_memopt_runs_with_what_the_plan_looks_for_and_nothing_else() -> None:
    code = """
from benchmarks.gpu_plan import needed
plain = lambda name: re.sub("[-_.]+", "-", name).lower()
found, todo, owners = {"memopt"}, needed(), metadata.packages_distributions()
while todo:
    name = plain(todo.pop())
    if name not in found:
        found.add(name)
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        todo += [re.match("[A-Za-z0-9._-]+", each)[0] for each in requires if "extra ==" not in each]
blocked = lambda name: name in owners and not {plain(each) for each in owners[name]} & found
assert blocked("hypothesis") and not blocked("pydantic")
import memopt
from tests.factories import tiny_model
memopt.patch(tiny_model("llama"))
print(memopt.load_recipe("exact-levels").name)
"""
    assert _python("blocked = lambda name: False" + FILTERED + code).stdout.endswith("exact-levels\n")


def test_without_pydantic_the_plan_still_prints_and_says_in_one_line_what_to_bring() -> None:
    code = """
stock = metadata.distributions
metadata.distributions = lambda **how: () if blocked(how.get("name", "").replace("-", "_")) else stock(**how)
from benchmarks import gpu_plan
gpu_plan.WHEELS = gpu_plan.ROOT / "build" / "no-wheels"
assert gpu_plan.main([]) == 0
sys.exit(gpu_plan.main(["--run", "1"]))
"""
    run = _python(f"blocked = {ABSENT!r}.__contains__" + FILTERED + code, check=False)
    assert run.returncode == gpu_plan.EXIT_CANNOT_RUN
    assert "\n 2. " in run.stdout
    assert run.stderr.count("\n") == 1
    assert "lacks pydantic." in run.stderr
    assert "make gpu-wheels GPU_WHEELS='pydantic'" in run.stderr


def _python(code: str, *, check: bool = True) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert run.returncode == 0 or not check, run.stderr
    return run


def test_tests_run_in_one_process_where_xdist_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "-n" in PARTS[1].command(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert gpu_plan._processes() == 0
    assert "-n" not in PARTS[1].command(tmp_path, processes=0)


def part_that_runs(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the parts by one that runs `code`, with the result's path as its argument."""
    (folder / "part_of_a_test.py").write_text(code)
    monkeypatch.setattr(gpu_plan, "PARTS", (Part(CHECKS, "?", "result.json", 1, "part_of_a_test"),))


#: A part that starts a process, writes its number as the result, and waits for a minute.
ENDLESS = (
    "import subprocess, sys, time\nfrom pathlib import Path\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    "Path(sys.argv[-1]).write_text(str(child.pid))\ntime.sleep(60)\n"
)


def assert_ended(result: Path) -> None:
    """On a busy machine a process that was killed still runs for a moment."""
    state, ends = Path(f"/proc/{int(result.read_text())}/stat"), time.monotonic() + 5

    def runs() -> bool:
        return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"

    while runs() and time.monotonic() < ends:
        time.sleep(0.05)
    assert not runs()


def test_a_part_that_takes_too_long_is_stopped_with_its_processes_and_keeps_what_it_has_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    part_that_runs(ENDLESS, tmp_path, monkeypatch)
    begun = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert gpu_plan.run(1, tmp_path, environment, limit=3.0) == gpu_plan.EXIT_CANNOT_RUN
    assert time.monotonic() - begun < 30
    assert_ended(tmp_path / "result.json")


def test_a_plan_that_is_ended_ends_its_part(tmp_path: Path) -> None:
    (tmp_path / "part_of_a_test.py").write_text(ENDLESS)
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom benchmarks import gpu_plan\n"
        "gpu_plan.PARTS = (gpu_plan.Part('checks', '?', 'result.json', 1, 'part_of_a_test'),)\n"
        f"sys.exit(gpu_plan.run(1, Path({str(tmp_path)!r}), {{**os.environ, 'PYTHONPATH': {str(tmp_path)!r}}}))\n"
    )
    plan = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    result, deadline = tmp_path / "result.json", time.monotonic() + 60
    while not (result.exists() and result.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert os.getsid(int(result.read_text())) == os.getsid(0)
    plan.terminate()
    assert plan.wait(timeout=60) == gpu_plan.EXIT_INTERRUPTED
    assert_ended(result)


@pytest.mark.parametrize("code", [0, 1])
def test_a_parts_exit_code_is_that_of_the_run(code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    part_that_runs(f"raise SystemExit({code})\n", tmp_path, monkeypatch)
    assert gpu_plan.run(1, tmp_path, {**os.environ, "PYTHONPATH": str(tmp_path)}) == code


def test_a_result_is_in_its_file_from_the_first_row_on(tmp_path: Path) -> None:
    path = tmp_path / "new" / "result.json"
    result = Result(path, {"device": "x"})
    result.add({"number": 1}, {"number": 2})
    found = json.loads(path.read_text())
    assert found == {"device": "x", "complete": False, "rows": [{"number": 1}, {"number": 2}]}
    assert result.done(left_out=0) == json.loads(path.read_text())
    assert json.loads(path.read_text())["complete"] is True
    assert [each.name for each in path.parent.iterdir()] == ["result.json"]


@no_gpu
def test_parts_of_tests_do_not_pass_where_there_is_no_gpu(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    command = PARTS[2].command(tmp_path, processes=0)
    run = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert run.returncode == 2
    assert "need a GPU" in run.stdout + run.stderr


@no_gpu
@pytest.mark.parametrize("name", ["first_step", "peaks", "tuning"])
def test_without_a_gpu_a_measuring_part_ends_with_one_sentence(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert importlib.import_module(f"benchmarks.{name}").main([]) == 2
    assert capsys.readouterr().err == NO_GPU + "\n"
