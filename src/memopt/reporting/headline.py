"""A report's answer as terminal lines, and the ways to train as a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Self

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from memopt.prediction.headline import Headline, gib
from memopt.reporting.text import as_text, line, percent


@dataclass(frozen=True)
class Fit(Headline):
    """The answer of :func:`memopt.fit`; `print` shows what ``memopt report`` prints."""

    @classmethod
    def of(cls, headline: Headline) -> Self:
        """The same answer."""
        values: dict[str, Any] = {each.name: getattr(headline, each.name) for each in fields(headline)}
        return cls(**values)

    def __str__(self) -> str:
        return as_text(headline_tables(self))


def headline_tables(headline: Headline) -> Iterator[RenderableType]:
    """The lines, the table of ways, and the assumptions."""
    yield line(f"{headline.model} ({headline.model_class}), recipe {headline.recipe}", "bold")
    yield line(headline.training)
    yield Text()
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for what, answer in headline.lines():
        style = ""
        if what == "fits" and headline.memory is not None:
            style = "bold green" if headline.fits else "bold red"
        grid.add_row(Text(what, style="bold"), line(answer, style))
    yield grid
    if headline.others:
        yield Text()
        yield _table(headline)
    yield Text()
    for note in headline.notes:
        yield line(note, "dim")


def _table(headline: Headline) -> RenderableType:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("way to train", no_wrap=True)
    for name in ("peak", "needs", "fits", "FLOPs", "moved", "batch"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("gradients", overflow="fold")
    for way in headline.ways():
        fits = headline.memory is not None and way.fits(headline.memory)
        table.add_row(
            way.name,
            gib(way.total),
            way.needs_like_total,
            Text("yes" if fits else "no", style="green" if fits else "red"),
            percent(way.flops - 1),
            percent(way.moved - 1),
            "" if way.batch is None else str(way.batch),
            way.accuracy,
        )
    return table
