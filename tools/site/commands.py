"""The page of the command line, from the commands themselves."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def page() -> str:
    """Usage, arguments and options of every command, as Markdown."""
    sys.path.insert(0, str(ROOT / "src"))
    import typer

    from memopt.cli.main import build_app

    return "\n".join(_lines(typer.main.get_command(build_app()))) + "\n"


def _lines(group: Any) -> Iterator[str]:
    yield "# Command line reference"
    yield ""
    yield "Every option of every command, as `memopt COMMAND --help` prints it. [Commands](commands.md) is the short"
    yield "list, with the exit codes."
    yield ""
    yield "These options may stand anywhere in a line:"
    yield ""
    context = group.make_context("memopt", [], resilient_parsing=True)
    yield from _table("option", [each for each in group.params if "completion" not in each.name], context)
    for name, command in group.commands.items():
        inner = command.make_context(name, [], parent=context, resilient_parsing=True)
        usage = command.get_usage(inner).removeprefix("Usage: ")
        yield from ("", f"## memopt {name}", "", "```text", " ".join(usage.split()), "```", "")
        yield from _text(inspect.cleandoc(command.help or ""))
        for kind in ("argument", "option"):
            if parameters := [each for each in command.params if each.param_type_name == kind]:
                yield from ("", *_table(kind, parameters, inner))


def _text(help: str) -> Iterator[str]:
    """Paragraphs of a help text; its example as code."""
    for paragraph in help.split("\n\n"):
        before, found, example = paragraph.partition("Example: ")
        if before.strip():
            yield from (_plain(before), "")
        if found:
            yield from ("```console", f"$ {' '.join(example.split())}", "```", "")


def _table(kind: str, parameters: list[Any], context: Any) -> Iterator[str]:
    yield from (f"| {kind} | meaning |", "|---|---|")
    for each in parameters:
        if record := each.get_help_record(context):
            left, meaning = record[0].partition(" <")[0] if kind == "argument" else record[0], record[1]
            yield f"| `{' '.join(left.split())}` | {_plain(' '.join(meaning.split())).replace('|', '&#124;')} |"


def _plain(text: str) -> str:
    """A help text in which no character is markup, except for what stands between backticks."""
    return "".join(
        part if part.startswith("`") else re.sub(r"([*_\[\]])", r"\\\1", part).replace("<", "&lt;")
        for part in re.split(r"(`[^`]*`)", text)
    )
