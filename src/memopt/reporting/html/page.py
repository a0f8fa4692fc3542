"""One self-contained HTML page: memory over a step with its peak, a block before and after, the saved tensors.

The templates beside this file escape all text, and the page allows itself no network and no script but its own.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import accumulate
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import memopt
from memopt.reporting.compare import UNSEEN
from memopt.reporting.curve import Curve, step_curve
from memopt.reporting.timeline import KINDS

if TYPE_CHECKING:
    from memopt.reporting.account import Account
    from memopt.reporting.compare import Comparison

_WIDTH, _HEIGHT = 2000, 1000
#: The chart is a little higher than its peak, so that the label of the peak fits in.
_HEADROOM = 1.2
_STEPS = (1, 2, 2.5, 5)
_CAUSES = 6
#: Kinds and tensors below these shares of the whole are summed in one row.
_SMALL_OF_PEAK, _SMALL_OF_BLOCK = 0.005, 0.001


@dataclass(frozen=True)
class Chart:
    """Memory over a step."""

    name: str
    curve: Curve
    moment: str
    """When the peak is, e.g. ``in backward of model.layers.3.mlp``."""
    at_peak: Mapping[tuple[str, str], int]
    """(kind, where) -> bytes that live at the peak."""


@dataclass(frozen=True)
class Plan:
    """A point of the frontier."""

    name: str
    nbytes: int
    cost: float
    """Time of a step, or its increase; `Frontier.cost_text` says it in words."""
    cost_text: str
    chosen: bool = False


@dataclass(frozen=True)
class Frontier:
    """Plans of which none is better in memory and in time than another."""

    caption: str
    cost_name: str
    plans: Sequence[Plan]


@dataclass(frozen=True)
class PageTable:
    """A table of texts; beside each text the number by which its column is sorted, if it has one."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[tuple[str, float | None]]]


def page(
    comparison: Comparison,
    *,
    charts: Sequence[Chart] | None = None,
    scope: str = "Weights, their gradients and optimizer states are not in it.",
    lines: Sequence[str] = (),
    tables: Sequence[PageTable] = (),
    frontier: Frontier | None = None,
    notes: Sequence[str] = (),
) -> str:
    """The page as text.

    Args:
        comparison: stock and patched, traced.
        charts: memory over the step, of each variant; by default what `comparison` knows of it.
        scope: a sentence that says what the charts leave out.
        lines: sentences to put first.
        tables: tables to put before the charts.
        frontier: memory against time.
        notes: sentences to put before those of `comparison`.
    """
    from jinja2 import Environment

    charts = list(_traced(comparison) if charts is None else charts)
    top = max((chart.curve.peak for chart in charts), default=0) * _HEADROOM
    kinds = {kind: name for chart in charts for kind, name in chart.curve.kinds.items() if any(chart.curve.live[kind])}
    colours = {kind: place for place, kind in enumerate(kinds)}
    source = files(__package__)
    script = source.joinpath("page.js").read_text(encoding="utf-8")
    environment = Environment(autoescape=True)
    environment.filters |= {"size": size, "percent": _percent, "breakable": _breakable}
    shown = SimpleNamespace(
        model=comparison.model,
        subtitle=f"{comparison.model_class}, recipe {comparison.recipe}: {comparison.training}",
        tiles=_tiles(comparison, charts),
        lines=lines,
        tables=[_table(each) for each in tables],
        scope=scope,
        charts=[_drawn(chart, top, colours) for chart in charts],
        kinds=[SimpleNamespace(name=name, colour=colours[kind]) for kind, name in kinds.items()],
        ticks=_ticks(top),
        peak_rows=_peak_rows(charts),
        frontier=frontier and _frontier(frontier),
        unit=comparison.before.unit,
        blocks=[_block(kind.title, kind.rows) for kind in comparison.kinds()],
        saved=_saved(comparison),
        total=SimpleNamespace(before=comparison.before.total, after=comparison.after.total),
        notes=list(dict.fromkeys((*notes, *comparison.notes))),
        sections=[list(section.lines()) for section in comparison.sections],
    )
    return environment.from_string(source.joinpath("page.html").read_text(encoding="utf-8")).render(
        page=shown,
        # Both are the package's own files, so they are not escaped; escaping would change what the digest is of.
        style=_safe(source.joinpath("page.css").read_text(encoding="utf-8")),
        script=_safe(script),
        script_digest=_safe(base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()),
        data={"charts": [_data(chart, kinds) for chart in charts]},
        version=memopt.__version__,
    )


def size(nbytes: float) -> str:
    """1.23 GiB, 45.6 MiB, 7.8 KiB, 0."""
    for unit, of in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= of:
            return f"{nbytes / of:.{2 if unit == 'GiB' else 1}f} {unit}"
    return f"{nbytes:.0f} B" if nbytes else "0"


def _safe(text: str) -> str:
    from markupsafe import Markup

    return Markup(text)


def _breakable(name: str) -> str:
    """A dotted name that a narrow column breaks between its words."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"([._])(?=\w)", r"\1<wbr>", str(escape(name))))


def _percent(sides: tuple[int, int]) -> str:
    before, after = sides
    if not before:
        return "new" if after else "0 %"
    change = round(100 * (after / before - 1))
    return f"{change:+d} %".replace("-", "\N{MINUS SIGN}") if change else "0 %"


def _traced(comparison: Comparison) -> Iterator[Chart]:
    if not comparison.has_step:
        return
    for name, account in (("stock", comparison.before), ("patched", comparison.after)):
        assert account.step is not None
        found = step_curve(account.step)
        last = account.step.last
        phase = "forward" if account.step.top < account.step.forward_ends else "backward"
        where = f"in {phase}" + (f" of {last.module}" if last is not None and last.module else "")
        yield Chart(name, found, where, _at_peak(account))


def _at_peak(account: Account) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for life, kind in account.step.at_peak if account.step else ():
        place = "blocks" if account.block_of(life.module) else life.module
        found[KINDS[kind], place] = found.get((KINDS[kind], place), 0) + life.nbytes
    return found


def _tiles(comparison: Comparison, charts: Sequence[Chart]) -> list[SimpleNamespace]:
    found = [("Saved for backward", comparison.before.total, comparison.after.total)]
    if len(charts) > 1:
        found.append(("Peak of a step", charts[0].curve.peak, charts[1].curve.peak))
    return [SimpleNamespace(what=what, before=before, after=after) for what, before, after in found]


def _table(table: PageTable) -> SimpleNamespace:
    columns = list(zip(*table.rows, strict=True))
    numbers = [all(sort is not None for _, sort in column) for column in columns] or [False] * len(table.heads)
    heads = [SimpleNamespace(name=name, number=number) for name, number in zip(table.heads, numbers, strict=True)]
    rows = [
        [SimpleNamespace(text=text, sort=text if sort is None else sort) for text, sort in row] for row in table.rows
    ]
    return SimpleNamespace(title=table.title, heads=heads, rows=rows)


def _drawn(chart: Chart, top: float, colours: Mapping[str, int]) -> SimpleNamespace:
    found = chart.curve
    stacked = zip(*(accumulate(values) for values in zip(*found.live.values(), strict=True)), strict=True)
    layers = [
        SimpleNamespace(
            name=found.kinds[kind],
            colour=colours[kind],
            most=max(found.live[kind]),
            path=_path(found, edge, top),
        )
        for kind, edge in zip(found.live, stacked, strict=True)
        if kind in colours and any(found.live[kind])
    ]
    ends = [*(first for _, first in found.phases[1:]), found.events]
    largest = sorted(chart.at_peak.items(), key=lambda item: -item[1])[:_CAUSES]
    causes = [
        SimpleNamespace(nbytes=nbytes, name=f"{kind}, {where}" if where else kind)
        for (kind, where), nbytes in largest
        if nbytes >= _SMALL_OF_PEAK * found.peak
    ]
    parts: dict[str, int] = {}
    for (kind, _), nbytes in chart.at_peak.items():
        parts[kind] = parts.get(kind, 0) + nbytes
    return SimpleNamespace(
        name=chart.name,
        peak=found.peak,
        moment=chart.moment,
        width=_WIDTH,
        layers=layers[::-1],  # the highest edge first: each next layer is painted over it
        phases=[
            SimpleNamespace(name=name, at=_share(first, found.events), width=_share(end - first, found.events))
            for (name, first), end in zip(found.phases, ends, strict=True)
        ],
        x=_share(found.moments[found.top] if found.moments else 0, found.events),
        y=_share(found.peak, top),
        top=found.top,
        moments=len(found.moments),
        causes=causes,
        parts=[SimpleNamespace(nbytes=nbytes, name=name) for name, nbytes in parts.items() if nbytes],
    )


def _path(curve: Curve, edge: Iterable[int], top: float) -> str:
    """The area below a staircase."""
    steps, last_x, last_y = [f"M0 {_HEIGHT}"], 0, _HEIGHT
    for moment, nbytes in zip(curve.moments, edge, strict=True):
        x, y = round(_WIDTH * moment / curve.events), round(_HEIGHT * (1 - nbytes / top))
        steps.append((f"h{x - last_x}" if x != last_x else "") + (f"v{y - last_y}" if y != last_y else ""))
        last_x, last_y = x, y
    return "".join(steps) + f"H{_WIDTH}V{_HEIGHT}Z"


def _share(part: float, whole: float) -> float:
    return round(100 * part / whole, 2) if whole else 0.0


def _ticks(top: float, least: float = 0.0) -> list[SimpleNamespace]:
    """Five or so round sizes up to `top`, each at its share of the height."""
    if top <= least:
        return []
    unit = next((unit for unit in (2**30, 2**20, 2**10) if top >= 1.5 * unit), 1)
    name = {2**30: "GiB", 2**20: "MiB", 2**10: "KiB", 1: "B"}[unit]
    rough = (top - least) / unit / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((each * power for each in _STEPS if each * power >= rough), 10 * power)
    first = math.ceil(least / unit / step)
    values = [step * count for count in range(first, int(top / unit / step) + 1)]
    return [
        SimpleNamespace(at=_share(value * unit - least, top - least), label=f"{value:g} {name}" if value else "0")
        for value in values
    ]


def _peak_rows(charts: Sequence[Chart]) -> list[SimpleNamespace]:
    keys = list(dict.fromkeys(key for chart in charts for key in chart.at_peak))
    most = max((chart.curve.peak for chart in charts), default=0)
    rows, small = [], [0] * len(charts)
    for kind, where in keys:
        sides = [chart.at_peak.get((kind, where), 0) for chart in charts]
        if max(sides) < _SMALL_OF_PEAK * most:
            small = [one + other for one, other in zip(small, sides, strict=True)]
        else:
            rows.append(SimpleNamespace(kind=kind, where=where or "outside of modules", sides=sides))
    if any(small):
        rows.append(SimpleNamespace(kind="small tensors", where="", sides=small))
    return sorted(rows, key=lambda row: -max(row.sides))


def _frontier(frontier: Frontier) -> SimpleNamespace:
    plans = sorted(frontier.plans, key=lambda plan: plan.nbytes)
    costs, sizes = [plan.cost for plan in plans], [plan.nbytes for plan in plans]
    low, high = min(costs), max(costs)
    least, most = 0.9 * min(sizes), 1.05 * max(sizes)
    points = [
        SimpleNamespace(
            name=plan.name,
            nbytes=plan.nbytes,
            cost=plan.cost_text,
            sort=plan.cost,
            chosen=plan.chosen,
            x=_share(plan.cost - low, (high - low) * 1.1 or 1.0) + 3,
            y=_share(plan.nbytes - least, most - least),
        )
        for plan in plans
    ]
    ends = {points[0].cost: points[0], points[-1].cost: points[-1]}.values()
    places = [f"{10 * point.x:g} {1000 - 10 * point.y:g}" for point in points]
    return SimpleNamespace(
        caption=frontier.caption,
        cost_name=frontier.cost_name,
        points=points,
        path="M" + "L".join(places),
        y_ticks=_ticks(most, least),
        x_ticks=[SimpleNamespace(at=x, label=text) for x, text in sorted((each.x, each.cost) for each in ends)],
    )


def _block(title: str, rows: Sequence[Any]) -> SimpleNamespace:
    before, after = sum(row.before for row in rows), sum(row.after for row in rows)
    most = max((max(row.before, row.after) for row in rows), default=0)
    shown: list[tuple[str, str, int, int]] = []
    small = [0, 0]
    for row in rows:
        if max(row.before, row.after) < _SMALL_OF_BLOCK * before:
            small = [small[0] + row.before, small[1] + row.after]
        else:
            shown.append((row.cause, row.what, row.before, row.after))
    if any(small):
        shown.append(("small tensors", "statistics and the like", small[0], small[1]))
    names = ("cause", "what", "before", "after")
    return SimpleNamespace(
        title=title,
        before=before,
        after=after,
        rows=[
            SimpleNamespace(
                **dict(zip(names, row, strict=True)),
                width_before=_share(row[2], most),
                width_after=_share(row[3], most),
            )
            for row in shown
        ],
    )


def _saved(comparison: Comparison) -> list[SimpleNamespace]:
    """The rows of every kind of block, times its number of blocks, and those outside; largest first."""
    groups = [
        (
            f"{len(kind.blocks)} blocks like {kind.blocks[0]}" if len(kind.blocks) > 1 else kind.blocks[0],
            len(kind.blocks),
            kind.rows,
        )
        for kind in comparison.kinds()
    ]
    groups.append(("outside of single blocks", 1, comparison.rest()))
    rows = [
        SimpleNamespace(
            where=where,
            order=order,
            cause=row.cause,
            what=row.what.partition(" x ")[2] or row.what,
            count_before=count * row.count_before,
            count_after=count * row.count_after,
            before=count * row.before,
            after=count * row.after,
        )
        for order, (where, count, group) in enumerate(groups)
        for row in group
    ]
    unseen = (comparison.before.unseen, comparison.after.unseen)
    if any(unseen):
        rows.append(
            SimpleNamespace(
                where=UNSEEN,
                order=len(groups),
                cause="other",
                what="",
                count_before=0,
                count_after=0,
                before=unseen[0],
                after=unseen[1],
            )
        )
    return sorted(rows, key=lambda row: -row.before)


def _data(chart: Chart, kinds: Mapping[str, str]) -> dict[str, Any]:
    """What the script reads; bytes in KiB."""
    found = chart.curve
    shown = [kind for kind in found.live if kind in kinds]
    return {
        "events": found.events,
        "phases": found.phases,
        "top": found.top,
        "moments": found.moments,
        "modules": found.modules,
        "kinds": [found.kinds[kind] for kind in shown],
        "live": [[round(nbytes / 1024) for nbytes in found.live[kind]] for kind in shown],
    }
