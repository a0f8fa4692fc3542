"""The report as terminal tables (rich). It fits 80 columns, and no name is cut short."""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from memopt.report.compare import BlockKind, Comparison, Row

SCOPE = (
    "Counted: activations that one forward keeps for backward, each storage once. Not counted: weights, gradients, "
    "optimizer states, inputs, and what is allocated and freed during the step."
)
_SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
#: Rows below this share of a unit are summed in one line.
_SMALL = 0.02


def comparison_tables(comparison: Comparison) -> Iterator[RenderableType]:
    """What to print, in order: title, a table per kind of block, the model's parts, summary and notes."""
    yield Text(f"{comparison.model} ({comparison.model_class}), recipe {comparison.recipe}", style="bold")
    yield Text(f"{comparison.training}")
    for kind in comparison.kinds():
        yield _block_table(kind, comparison)
    yield _part_table(comparison)
    yield Text(summary(comparison), style="bold")
    unit = comparison.before.unit
    if unit:
        yield Text(f"1 unit (u) = {_mib(unit)} MiB: the hidden state of all tokens in the compute dtype.")
    yield Text(SCOPE)
    for note in comparison.notes:
        yield Text(note)


def summary(comparison: Comparison) -> str:
    """The one line that matters."""
    before, after = (_size(account.total) for account in (comparison.before, comparison.after))
    return f"saved for backward: {before} -> {after} ({_percent(comparison.change)})"


def _block_table(kind: BlockKind, comparison: Comparison) -> Table:
    first, last = kind.blocks[0], kind.blocks[-1]
    title = first if len(kind.blocks) == 1 else f"{len(kind.blocks)} blocks alike, {first} to {last}: each"
    table = Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    table.add_column("kept as", overflow="fold")
    table.add_column("what", overflow="fold")
    for header in ("before u", "MiB", "after u", "MiB"):
        table.add_column(header, justify="right", no_wrap=True)
    unit = comparison.before.unit
    small = [row for row in kind.rows if max(row.before, row.after) < _SMALL * unit]
    for row in kind.rows:
        if row not in small:
            table.add_row(row.cause, _what(row), *_cells(row.before, row.after, unit))
    if small:
        sums = (sum(row.before for row in small), sum(row.after for row in small))
        table.add_row("small tensors", "statistics and the like", *_cells(*sums, unit))
    table.add_section()
    table.add_row("one block", "", *_cells(kind.before, kind.after, unit), style="bold")
    return table


def _part_table(comparison: Comparison) -> Table:
    table = Table(
        title="Whole model",
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("part", overflow="fold")
    for header in ("before MiB", "after MiB", "change"):
        table.add_column(header, justify="right", no_wrap=True)
    for name, before, after in comparison.parts():
        label = f"{len(comparison.before.blocks)} {name}" if name == "blocks" else name
        table.add_row(label, _mib(before), _mib(after), _percent(after / before - 1 if before else 0.0))
    table.add_section()
    before, after = comparison.before.total, comparison.after.total
    table.add_row("total", _mib(before), _mib(after), _percent(comparison.change), style="bold")
    return table


def _what(row: Row) -> str:
    count = row.count_before or row.count_after
    shape = "x".join(str(size) for size in row.shape)
    text = f"{_SHORT_DTYPES.get(row.dtype, row.dtype)} {shape}"
    return text if count == 1 else f"{count} x {text}"


def _cells(before: int, after: int, unit: int) -> tuple[str, str, str, str]:
    def units(nbytes: int) -> str:
        return f"{nbytes / unit:.2f}" if unit else "-"

    return units(before), _mib(before), units(after), _mib(after)


def _mib(nbytes: int) -> str:
    mib = nbytes / 2**20
    return f"{mib:.0f}" if mib >= 1000 else f"{mib:.1f}" if mib >= 10 or mib == 0 else f"{mib:.2f}"


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{_mib(nbytes)} MiB"


def _percent(change: float) -> str:
    return f"{100 * change:+.0f} %" if round(100 * change) else "0 %"
