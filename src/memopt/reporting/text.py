"""Tables as text, for `print` of a verdict or a comparison."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType


def as_text(renderables: Iterable[RenderableType]) -> str:
    """Renderables as lines without colour, as wide as the terminal or else 80 columns."""
    from rich.console import Console

    buffer = io.StringIO()
    console = Console(file=buffer, highlight=False, color_system=None)
    for renderable in renderables:
        console.print(renderable)
    lines = buffer.getvalue().splitlines()
    return "\n".join(line.rstrip() for line in lines).strip("\n")
