"""Text of a stranger's files on the terminal: escaped, whatever it holds and wherever it stands."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from memopt.checkpoint.card import CARD
from memopt.cli import common
from memopt.patches.checks import Check
from memopt.prediction.planner.choice import Frontier
from memopt.reporting.text import Terminal, as_text, line
from memopt.verification.run import Verdict
from tests.cli.conftest import Run

#: Clears the screen, sets the title, links, goes back and erases, C1, turns the writing, markup, a line of its own.
PARTS = (
    "\x1b[2J", "\x1b]0;title\x07", "\x1b]8;;https://example.org\x1b\\", "\r", "\x08\x08", "\x9b2J", "\x85", "\u2028",
    "\u202eevil", "\u2066", "[red]", "[/]", ":smile:", "\nFAKE: all checks passed", "|`*", "\x00", "\x7f",
)  # fmt: skip
HOSTILE = "a" + "".join(part for part in PARTS if part != "\x00") + "b"
Memopt = Callable[..., Run]


def raw(text: str) -> str:
    """The first thing in `text` that a terminal obeys; '' where it only shows."""
    found = [c for c in text if not (c.isprintable() or c == "\n")]
    fake = re.search(r"^\W*FAKE", text, re.MULTILINE)
    return ascii(found[0]) if found else ascii(fake[0]) if fake else ""


def check_shown(run: Run, codes: set[int]) -> None:
    assert run.code in codes, run.err
    assert (raw(run.out), raw(run.err)) == ("", "")
    assert "memopt failed" not in run.err


def failure(text: str) -> dict[str, Any]:
    return common.document("recipes", "error", error={"type": "ModelError", "message": text, "hint": None})


hostile_texts = st.lists(st.sampled_from(PARTS) | st.text(max_size=4) | st.sampled_from(("\ud800", "\udcff"))).map(
    "".join
)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(hostile_texts)
def test_no_text_reaches_a_stream_raw(text: str) -> None:
    """Each way in which the commands print, with each text."""
    out, err = io.StringIO(), io.StringIO()
    check = Check("weights.x", "weights", text, "fail", metric=text, value=1.0, reference=text, detail=text)
    table = Table(title=f"a{text}")
    table.add_column(text)
    table.add_row(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", common.Checked(out))
        patch.setattr(sys, "stderr", common.Forgiving(err))
        common.say(text, f"between {text} words")
        common.note(f"note: {text}")
        common.print_rich(text, line(text), table)
        common.print_rich(Text(text))
        common.print_json(failure(text))
        print(f"a library names {text} words", end=" ")
        print(f"a library names {text} words", file=sys.stderr)
        print(as_text([line(text), table]))
        print(Verdict((check,)))
        print(Frontier(text, text, text, ()))
        Terminal(sys.stderr).print(f"a{text}")
    for written in (out.getvalue(), err.getvalue()):
        # Of what a library prints the line breaks stay.
        kept = written.replace(f"names {text.partition(chr(10))[0]}", "")
        assert not [c for c in kept if not (c.isprintable() or c in "\n\t")]
    said = out.getvalue().split("\n")
    assert common.printable(text) == said[0]


def test_markup_is_shown_and_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    common.print_rich("[red]x[/] [/]", line("[bold]y[/bold]"))
    assert capsys.readouterr().out == "[red]x[/] [/]\n[bold]y[/bold]\n"


def test_json_keeps_its_value_and_writes_it_in_characters_that_a_terminal_shows() -> None:
    text = common.as_json(failure(HOSTILE))
    assert raw(text) == ""
    assert json.loads(text) == failure(HOSTILE)
    assert '"é"' in common.as_json(failure("é"))


def test_a_command_to_copy_names_the_path_for_a_shell(tmp_path: Path) -> None:
    import subprocess

    for name in ("plain", "with space", "q'uote", "a\x1b[2Jb", "a\nb", "é\u202e", "\udcff", "back\\slash\t'"):
        word = common.quoted(name)
        assert word.isprintable()
        told = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, check=True).stdout
        assert told == name.encode("utf-8", "surrogateescape")


def test_a_bar_is_drawn_again_and_a_name_in_it_is_escaped() -> None:
    err = io.StringIO()
    stream = common.Forgiving(err)
    for text in ("\r 10 %", "\x1b[A", "\x1b[2Kdone\r", "\r\x1b[2K\x1b[Aname \x1b[2J\r x"):
        stream.write(text)
    assert err.getvalue() == "\r 10 %\x1b[A\x1b[2Kdone\r\r\x1b[2K\x1b[Aname \\x1b[2J\\r x"


@pytest.fixture(scope="module")
def patched(saved_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from memopt import patch_checkpoint

    return patch_checkpoint(str(saved_llama), tmp_path_factory.mktemp("hostile") / "patched").out


def set_at(document: Any, where: str, value: Any) -> None:
    *parents, last = where.split("/")
    for parent in parents:
        document = document[int(parent) if parent.isdigit() else parent]
    document[int(last) if last.isdigit() else last] = value


PLACES = (
    "source/path", "source/model", "source/commit", "source/revision", "memopt_version", "recipe/name",
    "recipe/description", "entries/0/site", "entries/0/reason", "entries/0/action", "folds/0/fold/norm",
    "folds/0/fold/weight", "folds/0/dtype", "changed_outputs", "notes", "schema_version",
)  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_memopt_json_cannot_write_on_the_terminal(memopt: Memopt, patched: Path, place: str) -> None:
    original = (patched / "memopt.json").read_text()
    document = json.loads(original)
    set_at(document, place, [HOSTILE] if place in ("changed_outputs", "notes") else HOSTILE)
    (patched / "memopt.json").write_text(json.dumps(document))
    try:
        check_shown(memopt("verify", patched, "--level", "weights"), {0, 1, 2, 3})
        check_shown(memopt("verify", patched, "--level", "weights", "--json"), {0, 1, 2, 3})
        check_shown(memopt("unpatch", patched, "--out", patched.parent / "un"), {0, 1, 2})
        if place.startswith("recipe"):
            check_shown(memopt("report", patched, "--seq", 8), {0, 2})
    finally:
        (patched / "memopt.json").write_text(original)
        shutil.rmtree(patched.parent / "un", ignore_errors=True)


def test_names_of_folders_cannot_write_on_the_terminal(memopt: Memopt, llama: Path) -> None:
    name = HOSTILE.replace("/", "_")
    folder, out = llama.rename(llama.parent / name), llama.parent / f"out {name}"
    check_shown(memopt("patch", folder, "--dry-run"), {0})
    check_shown(memopt("patch", folder, "--out", out), {0})
    assert raw((out / CARD).read_text()) == ""
    check_shown(memopt("verify", out, "--level", "weights"), {0})
    check_shown(memopt("unpatch", out, "--out", llama.parent / "back"), {0})
    page = llama.parent / "page.html"
    check_shown(memopt("report", folder, "--seq", 8, "-v", "--html", page), {0})
    assert all(c.isprintable() or c == "\n" for c in page.read_text())
    check_shown(memopt("report", folder, "--seq", 8, "--json"), {0})
    check_shown(memopt("report", folder, "--seq", 8, "--budget", "1GiB"), {0})


def test_a_name_that_is_no_unicode_is_refused_before_anything_is_written(memopt: Memopt, llama: Path) -> None:
    folder = llama.rename(llama.parent / "caf\udce9")
    run = memopt("patch", folder, "--out", llama.parent / "out")
    check_shown(run, {2})
    assert "no valid Unicode" in run.err
    assert not (llama.parent / "out").exists()
    check_shown(memopt("report", folder, "--seq", 8), {0})


def test_a_recipe_and_a_config_cannot_write_on_the_terminal(memopt: Memopt, llama: Path) -> None:
    recipe = llama.parent / "r.yaml"
    recipe.write_text(yaml.safe_dump({"name": HOSTILE, "description": HOSTILE}))
    run = memopt("recipes", recipe)  # as YAML, whose strings go on in the next line
    assert yaml.safe_load(run.out)["name"] == HOSTILE
    assert all(c.isprintable() or c == "\n" for c in run.out)
    check_shown(memopt("recipes", recipe, "--json"), {0})
    check_shown(memopt("patch", llama, "-r", recipe, "--dry-run", "-v"), {0})
    check_shown(memopt("report", llama, "-r", recipe, "--seq", 8), {0})
    for text in (f"{{? {json.dumps(HOSTILE)} : 1}}", json.dumps({"norms": {"fold": HOSTILE}}), HOSTILE):
        recipe.write_text(text)
        check_shown(memopt("recipes", recipe), {2})
    config = json.loads((llama / "config.json").read_text())
    for key in ("model_type", "hidden_act", "architectures"):
        (llama / "config.json").write_text(
            json.dumps({**config, key: [HOSTILE] if key == "architectures" else HOSTILE})
        )
        check_shown(memopt("patch", llama, "--dry-run"), {0, 1, 2})
        check_shown(memopt("report", llama, "--seq", 8), {0, 1, 2})


def test_an_error_of_the_command_line_cannot_write_on_the_terminal(memopt: Memopt) -> None:
    for arguments in (
        (HOSTILE,),
        ("report", HOSTILE),
        ("patch", "m", f"--{HOSTILE}"),
        ("patch", "m", "--set", HOSTILE),
    ):
        check_shown(memopt(*arguments), {2})
        check_shown(memopt(*arguments, "--json"), {2})


def test_a_path_of_5000_characters_is_one_sentence(memopt: Memopt, llama: Path) -> None:
    long = "/tmp/" + "x" * 5_000
    for arguments in (
        ("recipes", f"{long}.yaml"), ("patch", long), ("patch", llama, "--out", long), ("report", long),
        ("verify", long), ("unpatch", long), ("report", llama, "--inputs", long), ("patch", llama, "--adapter", long),
    ):  # fmt: skip
        run = memopt(*arguments)
        check_shown(run, {2})
        assert len(run.err.splitlines()[-1]) < 1_500
