"""The frame of the command line: help, global options, errors, streams, exit codes."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from memopt.cli import common, recipes
from memopt.cli import main as cli
from tests.cli.conftest import Run

Memopt = Callable[..., Run]
START = [sys.executable, "-m", "memopt"]


def cpu_seconds(code: str) -> float:
    """CPU seconds of one Python process, which has to end well."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_is_fast_and_starts_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, memopt.cli.main as m\n"
        "code = m.main(['--help'])\n"
        "slow = {'torch', 'transformers', 'numpy', 'pydantic', 'yaml', 'huggingface_hub'} & sys.modules.keys()\n"
        "sys.exit(code or (9 if slow else 0))"
    )
    pairs = [(cpu_seconds(code), cpu_seconds("import typer")) for _ in range(5)]
    # Seconds depend on the machine and on what else runs there, so the measure is what any tool with typer pays.
    assert min(help_ for help_, _ in pairs) < 3 * min(typer for _, typer in pairs), pairs


def test_importing_memopt_imports_nothing_slow() -> None:
    code = "import sys, memopt; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help_with_its_options(memopt: Memopt, command: str) -> None:
    run = memopt(command, "--help")
    assert run.code == 0
    assert "--json" in run.out
    assert "\\[" not in run.out  # typer before 0.26 escapes brackets
    assert max(len(line) for line in run.out.splitlines()) <= 80


def test_the_list_of_commands_is_not_cut(memopt: Memopt) -> None:
    run = memopt("--help")
    assert "..." not in run.out.partition("Commands:")[2]
    assert max(len(line) for line in run.out.splitlines()) <= 80


def test_no_command_is_answered_by_the_help(memopt: Memopt) -> None:
    """On stderr and with 2, so that a script whose command is an empty variable sees that nothing was done."""
    run = memopt()
    assert (run.code, run.out) == (2, "")
    assert run.err == memopt("--help").out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("memopt re", {"report", "recipes"}),
        ("memopt report --chec", {"--checkpointing"}),
        ("memopt report --precision bf", {"bf16", "bf16-mixed", "bf16-autocast"}),
        ("memopt report --recipe exact", {"exact", "exact-levels", "exact-unfolded"}),
        ("memopt patch -r mes", {"mesa"}),
        ("memopt recipes int", {"int8"}),
        ("memopt report --recipe 'un", set()),
    ],
)
def test_a_shell_gets_completions_and_nothing_else(
    memopt: Memopt, monkeypatch: pytest.MonkeyPatch, line: str, words: set[str]
) -> None:
    monkeypatch.setenv("_MEMOPT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
    run = memopt()
    assert (set(run.out.split()), run.err) == (words, "")


@pytest.mark.parametrize("terminal", [False, True])
def test_what_takes_long_tells_the_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool
) -> None:
    monkeypatch.setattr(common, "_PATIENCE", 0.01)
    monkeypatch.setattr(common, "_PLAIN_INTERVAL", 60.0)
    monkeypatch.setattr(common, "_draws", lambda: terminal)
    with common.waiting("Tracing"):
        deadline = time.monotonic() + 60
        while not (err := capsys.readouterr().err) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert err == ("\x1b[2KTracing: 0 s so far\r" if terminal else "Tracing: 0 s so far\n")
    assert capsys.readouterr().err.replace("\x1b[2K", "") == ""


def test_what_is_quick_tells_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with common.waiting("Tracing"):
        pass
    assert capsys.readouterr().err == ""


def test_version_is_the_packages(memopt: Memopt) -> None:
    import memopt as package

    assert memopt("--version").out == f"memopt {package.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ptach"], "Did you mean 'patch'"),
        (["patch"], "MODEL"),
        (["patch", "x", "--forse"], "Did you mean --force?"),
        (["patch", "x", "y"], "y"),
        (["--nope"], "--nope"),
        (["report", ".", "--batch", "0"], "'--batch': 0 is less than 1. See"),
        (["report", ".", "--batch", "4,8"], "'--batch': '4,8' is not a whole number. See"),
        (["report", ".", "--lora-dropout", "2"], "'--lora-dropout': 2 is more than 1. See"),
        (["report", ".", "--lora-dropout", "half"], "'--lora-dropout': 'half' is not a number. See"),
        (["report", ".", "--train", "all"], "'--train': 'all' is not one of 'full', 'lora', 'qlora'. See"),
        (["report", ".", "--longest"], "needs a card, and no given inputs. Add --gpu CARD."),
        (["report", ".", "--longest", "--gpu", "t4", "--inputs", "x.pt"], "given inputs. Leave out --inputs."),
        (["recipes", "exat"], "Did you mean 'exact'?"),
        (["patch", ".", "--recipe", "exat"], "Did you mean 'exact'?"),
        (["patch", ".", "--set", "norms.fild=none"], "Did you mean 'fold'?"),
        (["patch", ".", "--set", "norms.fold"], "KEY=VALUE"),
        (["patch", ".", "--recipe", "no/such.yaml"], "does not exist"),
    ],
)
def test_a_usage_error_is_one_line_on_stderr_with_the_way_out(memopt: Memopt, arguments: list[str], words: str) -> None:
    run = memopt(*arguments)
    assert run.code == 2
    assert run.out == ""
    assert len(run.err.splitlines()) == 1
    assert words.lower() in run.err.lower()


@pytest.mark.parametrize(
    "arguments", [["--json"], ["ptach", "--json"], ["patch", "--json"], ["patch", "--json", "./no"]]
)
def test_an_error_with_json_is_one_document(memopt: Memopt, arguments: list[str]) -> None:
    run = memopt(*arguments)
    document = json.loads(run.out)
    assert run.code == 2
    assert (document["schema_version"], document["tool"], document["status"]) == (1, "memopt", "error")
    assert document["error"]["message"]
    assert document["command"] == ("patch" if "patch" in arguments else None)


def fail_with(error: BaseException) -> Callable[..., int]:
    def recipes() -> int:
        raise error

    return recipes


def test_an_unexpected_error_is_one_line_and_debug_shows_the_traceback(
    memopt: Memopt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipes, "recipes", fail_with(ZeroDivisionError("oh")))
    quiet = memopt("recipes")
    assert (quiet.code, quiet.out) == (2, "")
    assert quiet.err == "error: memopt failed: ZeroDivisionError: oh. Run it again with --debug for the traceback.\n"
    for arguments in (["--debug", "recipes"], ["recipes", "--debug"]):
        assert "Traceback" in memopt(*arguments).err


def test_control_c_is_130_in_one_line(memopt: Memopt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "recipes", fail_with(KeyboardInterrupt()))
    run = memopt("recipes")
    assert (run.code, run.out) == (130, "")
    assert len(run.err.splitlines()) == 1


#: A library whose import catches everything.
STUBBORN = """\
import sys, time
try:
    print("importing", file=sys.stderr, flush=True)
    time.sleep(60)
except BaseException:
    pass
"""


def test_control_c_ends_an_import_whose_library_catches_everything(tmp_path: Path) -> None:
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    code = (
        "import signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from memopt.cli import main, recipes\n"
        "def command(json: bool = False):\n    import stubborn\n    return 0\n"
        "recipes.recipes = command\nmain.run()\n"
    )
    for arguments in (["recipes"], ["recipes", "--json"]):
        command = [sys.executable, "-c", code, *arguments]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, **pipes, text=True, env=environment) as process:
            assert process.stderr is not None
            assert process.stderr.readline() == "importing\n"
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
        assert (process.returncode, err) == (130, "error: Interrupted.\n")
        assert not out or json.loads(out)["error"]["type"] == "Interrupted"
        assert bool(out) == ("--json" in arguments)


def test_control_c_in_a_write_to_stderr_is_handled_after_it(tmp_path: Path) -> None:
    """Python refuses to write to a buffered stream while it writes to it."""
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    code = (
        "import io, os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Raw(io.RawIOBase):\n"
        "    def writable(self):\n        return True\n"
        "    def write(self, data):\n"
        "        if b'importing' in bytes(data):\n            os.kill(os.getpid(), signal.SIGINT)\n"
        "        return os.write(2, data)\n"
        "sys.stderr = io.TextIOWrapper(io.BufferedWriter(Raw()))\n"
        "from memopt.cli import main, recipes\n"
        "def command(json: bool = False):\n    import stubborn\n    return 0\n"
        "recipes.recipes = command\nmain.run()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", code, "recipes"], capture_output=True, text=True, env=environment, timeout=50
    )
    assert (done.returncode, done.stderr) == (130, "importing\nerror: Interrupted.\n")


def test_a_value_in_the_help_is_named_by_a_word() -> None:
    for name, command in typer.main.get_command(cli.build_app()).commands.items():
        context = command.make_context(name, [], resilient_parsing=True)
        options = [each.get_help_record(context)[0] for each in command.params if each.param_type_name == "option"]
        assert [text for text in options if re.search(r"<(str|path|int|float|bool)>", text)] == []


def test_termination_keeps_its_code(memopt: Memopt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "recipes", fail_with(SystemExit(143)))
    assert memopt("recipes").code == 143


def test_a_reader_that_leaves_is_silent() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-c", "from memopt.cli.main import run; run()", "recipes", "exact"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert done.returncode == 141
    assert done.stderr == ""


def test_there_are_no_colours_in_a_pipe() -> None:
    done = subprocess.run([*START, "recipes"], capture_output=True, check=True)
    assert b"\x1b" not in done.stdout + done.stderr


@pytest.mark.parametrize("arguments", [["--no-color", "recipes"], ["recipes", "--no-color"]])
def test_no_color_forbids_colours_wherever_it_stands(
    memopt: Memopt, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setenv("NO_COLOR", "")
    assert memopt(*arguments).code == 0
    assert os.environ["NO_COLOR"] == "1"


def test_the_module_runs_like_the_command() -> None:
    done = subprocess.run([*START, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("memopt ")


def test_recipes_lists_every_shipped_recipe(memopt: Memopt) -> None:
    from memopt.plan.shipped import shipped

    text = memopt("recipes").out
    assert all(name in text for name in shipped())
    assert max(len(line) for line in text.splitlines()) <= 80
    listed = json.loads(memopt("recipes", "--json").out)["recipes"]
    assert {each["name"] for each in listed} == set(shipped())


def test_a_printed_recipe_is_a_recipe(memopt: Memopt, tmp_path: Path) -> None:
    from memopt.plan.recipe import load_recipe

    (tmp_path / "mine.yaml").write_text(memopt("recipes", "exact").out)
    assert load_recipe(tmp_path / "mine.yaml") == load_recipe("exact")
    assert json.loads(memopt("recipes", "exact", "--json").out)["recipe"]["norms"]["fold"] == "auto"


@pytest.mark.parametrize(
    "name", ["patch", "unpatch", "load", "plan_for", "Recipe", "load_recipe", "make_plan", "Plan", "__version__"]
)
def test_every_public_name_is_found(name: str) -> None:
    import memopt as package

    assert getattr(package, name) is not None
    assert name in dir(package)


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    import memopt as package

    with pytest.raises(AttributeError, match="pacth"):
        package.pacth  # noqa: B018


_IN_A_DESTRUCTOR = """
import os, signal, time
from memopt.cli import main

class Closing:
    def close(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)

    def __del__(self):
        self.close()

def works(arguments):
    Closing()
    time.sleep(20)
    return 0

main.main = works
signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where the tests run in the background
try:
    main.run()
except KeyboardInterrupt:
    os._exit(7)
"""


def test_an_interrupt_in_a_destructor_is_not_lost() -> None:
    done = subprocess.run([sys.executable, "-c", _IN_A_DESTRUCTOR], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (7, b"")
