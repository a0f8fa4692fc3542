"""One self-contained HTML page: memory over a step with its peak, a block before and after, the saved tensors.

The templates beside this file escape all text, and the page permits no network access and no script but its own.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from importlib.resources import files
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

import memopt
from memopt.environment.files import format_bytes
from memopt.errors import printable
from memopt.reporting.compare import UNSEEN, Row
from memopt.reporting.html.shapes import Chart, chart_data, drawn_chart, peak_rows, share, ticks
from memopt.reporting.text import changed

if TYPE_CHECKING:
    from memopt.reporting.compare import BlockKind, Comparison

#: The chart is a little higher than its peak, so that the label of the peak fits in.
_HEADROOM = 1.2
#: Tensors below this share of a block are summed in one row.
_SMALL_OF_BLOCK = 0.001


def page(
    comparison: Comparison,
    *,
    charts: Sequence[Chart] = (),
    lines: Sequence[str] = (),
    tables: Sequence[SimpleNamespace] = (),
    frontier: SimpleNamespace | None = None,
    notes: Sequence[str] = (),
) -> str:
    """The page as text.

    Args:
        comparison: traced comparison of the stock and the patched model.
        charts: memory over the step, of each variant.
        lines: sentences to put first.
        tables: tables to put before the charts, made by `memopt.reporting.charts.ways_table`.
        frontier: chart of memory against time, made by `memopt.reporting.charts.drawn_frontier`.
        notes: sentences to put before those of `comparison`.
    """
    from jinja2 import Environment

    top = max((chart.peak for chart in charts), default=0) * _HEADROOM
    kinds = dict.fromkeys(kind for chart in charts for kind, values in chart.live.items() if any(values))
    colours = {kind: place for place, kind in enumerate(kinds)}
    source = files(__package__)
    script = source.joinpath("page.js").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, finalize=_shown)
    environment.filters |= {"size": format_bytes, "percent": _percent, "breakable": _breakable, "scaled": share}
    shown = SimpleNamespace(
        model=comparison.model,
        subtitle=f"{comparison.model_class}, recipe {comparison.recipe}: {comparison.training}",
        tiles=_tiles(comparison, charts),
        lines=lines,
        tables=tables,
        charts=[drawn_chart(chart, top, colours) for chart in charts],
        kinds=[SimpleNamespace(name=kind, colour=colour) for kind, colour in colours.items()],
        ticks=ticks(top),
        peak_rows=peak_rows(charts),
        frontier=frontier,
        unit=comparison.before.unit,
        blocks=[_block(kind) for kind in comparison.kinds()],
        saved=_saved(comparison),
        total=SimpleNamespace(before=comparison.before.total, after=comparison.after.total),
        notes=list(dict.fromkeys((*notes, *comparison.notes))),
        sections=[list(section.lines()) for section in comparison.sections],
    )
    return environment.from_string(source.joinpath("page.html").read_text(encoding="utf-8")).render(
        page=shown,
        # Both are the package's own files, so they are not escaped; escaping would invalidate the digest.
        style=Markup(source.joinpath("page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_digest=Markup(base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()),
        data={"charts": [chart_data(chart, kinds) for chart in charts]},
        version=memopt.__version__,
    )


def _shown(value: Any) -> Any:
    """A text whose control characters are escaped, e.g. those that change the direction of writing."""
    return printable(value, "\n") if isinstance(value, str) and not isinstance(value, Markup) else value


def _breakable(name: str) -> str:
    """A dotted name that a narrow column breaks between its words."""
    return Markup(re.sub(r"([._])(?=\w)", r"\1<wbr>", str(escape(_shown(name)))))


def _percent(sides: tuple[int, int]) -> str:
    return changed(*sides).replace("-", "\N{MINUS SIGN}")


def _tiles(comparison: Comparison, charts: Sequence[Chart]) -> list[SimpleNamespace]:
    found = [("Saved for backward", comparison.before.total, comparison.after.total)]
    if len(charts) > 1:
        found.append(("Live at the peak of a step", charts[0].peak, charts[1].peak))
    return [SimpleNamespace(what=what, before=before, after=after) for what, before, after in found]


def _block(kind: BlockKind) -> SimpleNamespace:
    small = [row for row in kind.rows if max(row.before, row.after) < _SMALL_OF_BLOCK * kind.before]
    shown: list[Any] = [row for row in kind.rows if row not in small]
    before, after = sum(row.before for row in small), sum(row.after for row in small)
    if before or after:
        what = "statistics and the like"
        shown.append(SimpleNamespace(cause="small tensors", what=what, before=before, after=after))
    most = max((max(row.before, row.after) for row in kind.rows), default=0)
    return SimpleNamespace(title=kind.title, before=kind.before, after=kind.after, most=most, rows=shown)


def _saved(comparison: Comparison) -> list[SimpleNamespace]:
    """Rows of every kind of block, multiplied by its number of blocks, and rows outside the blocks; largest first."""
    groups = [
        (
            f"{len(kind.blocks)} blocks like {kind.blocks[0]}" if len(kind.blocks) > 1 else kind.blocks[0],
            len(kind.blocks),
            kind.rows,
        )
        for kind in comparison.kinds()
    ]
    groups.append(("outside of single blocks", 1, comparison.rest()))
    unseen = (comparison.before.unseen, comparison.after.unseen)
    if any(unseen):
        groups.append((UNSEEN, 1, (Row("other", "", (), *unseen, 0, 0),)))
    rows = [
        SimpleNamespace(
            where=where,
            order=order,
            cause=row.cause,
            what=row.what.rpartition(" x ")[2],
            count_before=count * row.count_before,
            count_after=count * row.count_after,
            before=count * row.before,
            after=count * row.after,
        )
        for order, (where, count, group) in enumerate(groups)
        for row in group
    ]
    return sorted(rows, key=lambda row: -row.before)
