"""The report as terminal tables (rich) that fit 80 columns and shorten no name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from memopt.reporting.text import line

if TYPE_CHECKING:
    from memopt.reporting.compare import Comparison, Row

SCOPE = (
    "Counted: activations that one forward saves for backward, each storage once; for the peak, every storage that "
    "lives then. Not counted: weights, their gradients, optimizer states, inputs, and what kernels use inside."
)
#: Rows below this share of a unit are summed in one line.
_SMALL = 0.02
#: And those below this share of the peak.
_SMALL_OF_PEAK = 0.005


def comparison_tables(comparison: Comparison) -> Iterator[RenderableType]:
    """In order: title, a table per kind of block, the rest of the model, the sums, what is counted."""
    unit = comparison.before.unit
    yield line(f"{comparison.model} ({comparison.model_class}), recipe {comparison.recipe}", "bold")
    yield line(f"{comparison.training}")
    for kind in comparison.kinds():
        yield Text()
        yield line(kind.title, "bold")
        yield _row_table(kind.rows, unit, total="one block")
    if rest := comparison.rest():
        yield Text("\nOutside of single blocks", style="bold")
        yield _row_table(rest, unit, total="together")
    yield Text("\nWhole model", style="bold")
    yield _part_table(comparison)
    if comparison.has_step:
        yield Text("\nPeak of a step", style="bold")
        yield _peak_table(comparison)
    yield Text(f"\n{summary(comparison)}\n", style="bold")
    if unit:
        yield Text(f"1 unit (u) = {_mib(unit)} MiB: the hidden state of all tokens in the compute dtype.")
    yield Text(SCOPE)
    for note in comparison.notes:
        yield line(note)
    for section in comparison.sections:
        yield Text()
        yield from map(line, section.lines())


def summary(comparison: Comparison) -> str:
    """The lines that matter."""
    accounts = (comparison.before, comparison.after)
    lines = [_change("saved for backward", *(account.total for account in accounts))]
    if comparison.has_step:
        lines.append(_change("peak of a step", *(account.step.peak for account in accounts if account.step)))
    return "\n".join(lines)


def _change(what: str, before: int, after: int) -> str:
    return f"{what}: {_size(before)} -> {_size(after)} ({_percent(after / before - 1 if before else 0.0)})"


def _row_table(rows: Sequence[Row], unit: int, *, total: str) -> Table:
    table = _table("saved as", "what", numbers=("before u", "MiB", "after u", "MiB"))
    small = [row for row in rows if max(row.before, row.after) < _SMALL * unit]
    for row in rows:
        if row not in small:
            table.add_row(row.cause, row.what, *_cells(row.before, row.after, unit))
    if small:
        sums = (sum(row.before for row in small), sum(row.after for row in small))
        table.add_row("small tensors", "statistics and the like", *_cells(*sums, unit))
    table.add_section()
    sums = (sum(row.before for row in rows), sum(row.after for row in rows))
    table.add_row(total, "", *_cells(*sums, unit), style="bold", end_section=True)
    return table


def _part_table(comparison: Comparison) -> Table:
    table = _table("part", numbers=("before MiB", "after MiB", "change"))
    for name, before, after in comparison.parts():
        label = f"{len(comparison.before.blocks)} {name}" if name == "blocks" else name
        table.add_row(label, _mib(before), _mib(after), _percent(after / before - 1 if before else 0.0))
    table.add_section()
    before, after = comparison.before.total, comparison.after.total
    table.add_row("total", _mib(before), _mib(after), _percent(comparison.change), style="bold", end_section=True)
    return table


def _peak_table(comparison: Comparison) -> Table:
    from memopt.reporting.timeline import KINDS

    table = _table("lives at the peak", "where", numbers=("before MiB", "after MiB"))
    steps = [account.step for account in (comparison.before, comparison.after) if account.step]
    small = [0, 0]
    for kind, place, before, after in comparison.at_peak():
        if max(before, after) < _SMALL_OF_PEAK * max(step.peak for step in steps):
            small = [small[0] + before, small[1] + after]
        else:
            table.add_row(KINDS[kind], place or "outside of modules", _mib(before), _mib(after))
    if any(small):
        table.add_row("small tensors", "", *map(_mib, small))
    table.add_section()
    peaks = [_mib(step.peak) for step in steps]
    table.add_row("total", "", *peaks, style="bold", end_section=True)
    return table


def _table(*words: str, numbers: Sequence[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for place, header in enumerate(words):
        table.add_column(header, overflow="fold", no_wrap=place == 0)
    for header in numbers:
        table.add_column(header, justify="right", no_wrap=True)
    return table


def _cells(before: int, after: int, unit: int) -> tuple[str, str, str, str]:
    def units(nbytes: int) -> str:
        return f"{nbytes / unit:.2f}" if unit else "-"

    return units(before), _mib(before), units(after), _mib(after)


def _mib(nbytes: int) -> str:
    mib = nbytes / 2**20
    if not nbytes:
        return "0"
    return f"{mib:.0f}" if mib >= 1000 else f"{mib:.1f}" if mib >= 10 else f"{mib:.2f}"


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{_mib(nbytes)} MiB"


def _percent(change: float) -> str:
    return f"{100 * change:+.0f} %" if round(100 * change) else "0 %"
