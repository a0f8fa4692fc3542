"""A stdout or stderr that cannot be written: exit 2, one sentence, and whether the folder was written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from memopt.cli.main import main
from tests.cli.conftest import Run

FULL = "/dev/full"
pytestmark = pytest.mark.skipif(not Path(FULL).exists(), reason=f"{FULL} is Linux's")


def shell(arguments: str) -> Run:
    """`memopt` with these arguments and redirections; its import is the only cost."""
    done = subprocess.run(
        f'"{sys.executable}" -m memopt {arguments}', shell=True, capture_output=True, text=True, check=False
    )
    return Run(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("stdout", [f">{FULL}", ">&-"], ids=["full", "closed"])
@pytest.mark.parametrize("arguments", ["recipes --json", "recipes", "--help"])
def test_a_result_that_cannot_be_printed_is_one_sentence(arguments: str, stdout: str) -> None:
    run = shell(f"{arguments} {stdout}")
    assert run.code == 2
    assert len(run.err.splitlines()) == 1
    assert run.err.startswith("error: ")
    assert "stdout" in run.err


@pytest.mark.parametrize("stderr", [f"2>{FULL}", "2>&-"], ids=["full", "closed"])
def test_without_a_stderr_the_result_and_the_exit_code_are_the_same(stderr: str) -> None:
    assert shell(f"recipes --json {stderr}") == shell("recipes --json 2>/dev/null")
    assert shell(f"nothing {stderr}").code == 2


@pytest.mark.parametrize("form", [["--json"], []], ids=["json", "tables"])
def test_a_patched_folder_whose_result_cannot_be_printed_is_named(
    llama: Path, form: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for out, options, words in (
        ("out", [], "'out' was written and is complete."),
        ("dry", ["--dry-run"], "Nothing was"),
    ):
        with open(FULL, "w") as full:
            monkeypatch.setattr(sys, "stdout", full)
            assert main(["patch", str(llama), "--out", out, *options, *form]) == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith("error: The result cannot be written to stdout: No space left on device.")
        assert words in last
        assert (llama.parent / out / "memopt.json").exists() == (not options)


def test_the_process_ends_without_freeing_what_it_holds_object_by_object() -> None:
    program = (
        "import atexit\n"
        "from memopt.cli import main\n"
        "class Held:\n"
        "    def __del__(self): print('freed')\n"
        "held = Held()\n"
        "main.main = lambda arguments: (atexit.register(print, 'a handler'), 3)[1]\n"
        "main.run()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("a handler\n", 3)
