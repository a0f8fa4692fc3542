"""The first lines of a report as terminal output, with the ways to train as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from memopt.prediction.headline import Headline, Largest, Way, gib
from memopt.reporting.text import as_text, line, percent


@dataclass(frozen=True)
class Fit(Headline):
    """The answer of :func:`memopt.fit`; `print` shows the output of ``memopt report``."""

    @classmethod
    def of(cls, headline: Headline) -> Fit:
        """`headline` as a `Fit`."""
        values: dict[str, Any] = {each.name: getattr(headline, each.name) for each in fields(headline)}
        return cls(**values)

    def __str__(self) -> str:
        return as_text(headline_tables(self))

    __repr__ = __str__


def headline_tables(headline: Headline) -> Iterator[RenderableType]:
    """The lines of the answer, the table of ways to train, and the assumptions."""
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
    found = columns(headline)
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in found:
        justify: Literal["left", "right"] = "left" if name in WORDS else "right"
        table.add_column(name, justify=justify, no_wrap=name != "gradients", overflow="fold")
    for way in headline.ways():
        texts = (cell(way)[0] for cell in found.values())
        table.add_row(*(Text(text, style={"yes": "green", "no": "red"}.get(text, "")) for text in texts))
    return table


#: Headings of columns without numbers.
WORDS = frozenset({"way to train", "fits", "gradients"})


def columns(headline: Headline) -> dict[str, Callable[[Way], tuple[str, Any]]]:
    """Heading -> function that returns (text of a way's cell, value by which the column is sorted).

    Columns for the largest batch come with the bytes that a step needs, the longest sequence with bytes in CPU memory.
    """
    memory, stock = headline.memory, headline.stock
    found: dict[str, Callable[[Way], tuple[str, Any]]] = {
        "way to train": lambda way: (way.name, way.name),
        "peak": lambda way: (gib(way.total), way.total),
    }
    by_length = stock.seq is not None and stock.batch is None
    if memory is not None and not by_length:
        found["needs"] = lambda way: (way.needs_like_total, way.needs)
        found["fits"] = lambda way: ("yes" if way.fits(memory) else "no",) * 2
    found["FLOPs"] = lambda way: (percent(way.flops - 1), way.flops)
    found["moved"] = lambda way: (percent(way.moved - 1), way.moved)
    if by_length:
        found["longest"] = lambda way: (_cell(way.seq), way.seq.value if way.seq else 0)
        found["on CPU"] = lambda way: (gib(held), held) if (held := way.seq.offloaded if way.seq else 0) else ("", 0)
    elif stock.batch is not None:
        found["batch"] = lambda way: (_cell(way.batch), way.batch.value if way.batch else 0)
    found["gradients"] = lambda way: (way.accuracy,) * 2
    return found


def _cell(largest: Largest | None) -> str:
    """A narrow cell: a wider table would break headings at 80 columns."""
    return str(largest or "").replace(" or more", "+")
