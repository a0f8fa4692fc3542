"""Terminal output of a plan, of checks, of a patched model and of the first lines of a report.

Renderers take plain data and print nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memopt.errors import printable
from memopt.patches.base import PlanView
from memopt.patches.checks import Check
from memopt.patches.registry import rows
from memopt.plan.plan import Entry, Plan, coverage_totals
from memopt.plan.shipped import shipped
from memopt.prediction.headline import Headline, Largest, Way, gib
from memopt.reporting.text import as_text, line, percent

_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")


def coverage_table(plan: Plan, *, verbose: bool = False) -> RenderableType:
    """Every site with its action and reason; sites that differ only in their layer are one row, unless `verbose`."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False)
    table.add_column("what", no_wrap=True)
    table.add_column("n", justify="right", no_wrap=True)
    table.add_column("action", no_wrap=True)
    table.add_column("where, and why", overflow="fold")
    groups = [[entry] for entry in plan.entries] if verbose else _grouped(plan.entries)
    nouns = {kind: its.noun for kind, its in rows().items()}
    for group in groups:
        first = group[0]
        action = Text(first.action, style="green" if first.rewritten else "dim")
        place = Group(line(_where(group)), Padding(line(_relative(first), "dim"), (0, 0, 0, 2)))
        table.add_row(Text(nouns.get(first.kind, first.kind)), str(len(group)), action, place)
    return Group(table, Text(), *map(Text, coverage_totals(plan)))


def checks_table(checks: Sequence[Check]) -> RenderableType:
    """Every check with its number, limit and reference; passed checks that differ only in subject are one row."""
    parts: list[RenderableType] = []
    for level, same_level in groupby(checks, key=lambda check: check.level):
        parts.append(Text(level, style="bold"))
        table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        reasons: list[str] = []
        for _, same in groupby(same_level, key=_but_for_its_subject):
            first, *others = alike = list(same)
            mark, style = _MARKS[first.status]
            subject = f"{first.subject} and {len(others)} more" if others else first.subject
            reference = f"against: {first.reference}" if first.reference else ""
            rows = line(subject)
            for text in filter(None, (_number(first), first.detail, reference)):
                rows.append("\n  " + printable(text), style="dim" if text == reference else "")
            table.add_row(Text(mark, style=style), rows)
            reasons += [check.threshold_reason for check in alike]
        parts.append(table)
        limits = "; ".join(dict.fromkeys(filter(None, reasons)))
        parts += [line(f"  Limits: {limits}.", "dim")] if limits else []
        parts.append(Text())
    return Group(*parts)


def checks_summary(checks: Sequence[Check]) -> RenderableType:
    """One row for each level: its number of checks, and the check nearest to its limit; then all failures in full."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, show_header=False)
    for _ in range(3):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for level, group in groupby(checks, key=lambda check: check.level):
        its = list(group)
        mark, style = _MARKS[next(status for status in _WORST_FIRST if any(check.status == status for check in its))]
        nearest = max(its, key=lambda check: -1.0 if check.threshold is None else check.excess)
        count = f"{len(its)} check" + ("s" if len(its) > 1 else "")
        table.add_row(Text(mark, style=style), Text(level), Text(count), line(_number(nearest)))
    rest = [check for check in checks if check.status != "pass"]
    return Group(table, Text(), *([checks_table(rest)] if rest else []))


_WORST_FIRST = ("fail", "skip", "warn", "pass")
_MARKS = {
    "pass": ("  ok", "green"),
    "warn": ("warn", "yellow"),
    "fail": ("FAIL", "bold red"),
    "skip": ("skip", "yellow"),
}


def _but_for_its_subject(check: Check) -> object:
    """Equal for passed checks that differ only in their subject."""
    return replace(check, subject="", n=0) if check.status == "pass" else id(check)


def _number(check: Check) -> str:
    if check.value is None:
        return ""
    limit = "" if check.threshold is None else f" (limit {check.threshold:.4g})"
    return f"{check.metric}: {check.value:.4g}{limit}"


def _grouped(entries: Sequence[Entry]) -> list[list[Entry]]:
    groups: dict[tuple[str, ...], list[Entry]] = {}
    for entry in entries:
        key = (entry.kind, _INDEX.sub("#", entry.site), entry.action, _INDEX.sub("#", entry.reason))
        groups.setdefault(key, []).append(entry)
    return list(groups.values())


def _where(group: list[Entry]) -> str:
    """One name for all sites of a group: ``layers.0..29.norm``, ``layers.{0,2,5..7}.norm``."""
    found = [_INDEX.findall(entry.site) for entry in group]
    columns = iter([sorted({int(index) for index in column}) for column in zip(*found, strict=True)])
    return _INDEX.sub(lambda match: _ranges(next(columns)), group[0].site) or "(the model)"


def _ranges(numbers: list[int]) -> str:
    runs = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        values = [value for _, value in run]
        runs.append(str(values[0]) if len(values) == 1 else f"{values[0]}..{values[-1]}")
    return runs[0] if len(runs) == 1 else "{" + ",".join(runs) + "}"


def _relative(entry: Entry) -> str:
    """The reason, where module names lose the prefix (the block) that they share with the site's own name."""
    parts = entry.site.split(".")
    prefixes: Iterable[str] = (".".join(parts[:length]) + "." for length in range(len(parts) - 1, 0, -1))
    prefix = next((prefix for prefix in prefixes if prefix in entry.reason), "")
    return entry.reason.replace(prefix, "") if prefix else entry.reason


@dataclass(frozen=True)
class Summary:
    """Summary of a patched model; `print` shows it in a few lines."""

    modules: int
    """Number of modules that run memopt's forward; 0 for a stock model."""
    plan: PlanView | None = None
    """The action and reason of each site; None if the model has no record."""
    refused: tuple[tuple[str, str], ...] = ()
    """(module, reason) of planned rewrites that could not be applied."""
    remarks: tuple[str, ...] = ()
    """Settings of the model itself that concern the patches, and patterns of the recipe that match nothing."""

    @property
    def recipe(self) -> str | None:
        """Name of the recipe."""
        return None if self.plan is None else self.plan.recipe.name

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about the recipe on this model, such as the error of an approximate one."""
        plan = self.plan
        return () if plan is None else tuple(note for note in plan.notes if note not in plan.idle)

    def __str__(self) -> str:
        if not (self.modules or self.remarks):
            return "This model is not patched; memopt.patch(model) patches it."
        if self.plan is None:
            return f"Part of a patched model: {self.modules} of its modules are patched. Undo: memopt.unpatch(model)"
        lines = [f"Patched by recipe '{self.recipe}': {self.modules} modules run memopt's forward."]
        if self.plan.recipe.name not in shipped() and self.plan.recipe.description:
            lines.append(f"  {self.plan.recipe.description}")
        lines += [f"  {line}" for line in coverage_totals(self.plan)]
        lines += [f"  unchanged: {name or 'the forward of the model'}: {reason}" for name, reason in self.refused]
        if inexact := self.plan.recipe.without("approximate", "sampled"):
            keys = ", ".join(setting.partition(".")[0] for setting in inexact)
            lines.append(f"  under torch.compile these are off as far as they are not exact: {keys}")
        if self.plan.sites.unseen:
            lines.append(f"  not seen: {self.plan.sites.unseen}; patch with inputs=...")
        lines += [f"  {sentence}" for sentence in (*self.notes, *self.remarks)]
        return "\n".join(map(printable, [*lines, "Undo: memopt.unpatch(model)"]))

    __repr__ = __str__


@dataclass(frozen=True)
class Fit(Headline):
    """The answer of :func:`memopt.fit`; `print` shows the output of ``memopt report``."""

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
    """Heading -> function that returns (text of a way's cell, value by which the column is sorted). Columns for the
    largest batch come with the bytes that a step needs, the longest sequence with bytes in CPU memory."""
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
