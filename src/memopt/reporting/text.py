"""The console for all tables, which escapes untrusted text, and tables rendered as text for `print`."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from memopt.errors import printable


class Terminal(Console):
    """A console without markup, highlighting and emoji codes, which escapes control characters of terminals in texts.
    It writes to the stream beneath the escaping streams of the command line, so its own control sequences pass.
    """

    def __init__(self, file: Any = None, **options: Any) -> None:
        file = sys.stdout if file is None else file
        file = getattr(file, "unescaped", file)
        super().__init__(file=file, markup=False, highlight=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text, "\n"), style, control)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def line(text: str, style: str = "") -> Text:
    """One line, with all line breaks in names escaped."""
    return Text(printable(text), style=style)


def as_text(renderables: Iterable[RenderableType]) -> str:
    """Renderables as lines without colour, as wide as the terminal or else 80 columns."""
    buffer = io.StringIO()
    console = Terminal(file=buffer, color_system=None)
    for renderable in renderables:
        console.print(renderable)
    lines = buffer.getvalue().splitlines()
    return "\n".join(line.rstrip() for line in lines).strip("\n")


def percent(change: float) -> str:
    """``-47 %`` for -0.47."""
    return f"{100 * change:+.0f} %" if round(100 * change) else "0 %"


def changed(before: int, after: int) -> str:
    """How `after` differs from `before`, by `percent`; ``new`` if there was nothing before."""
    return percent(after / before - 1) if before else "new" if after else "0 %"
