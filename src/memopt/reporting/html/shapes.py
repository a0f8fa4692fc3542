"""What the page draws, and how: memory over a step, and plans by memory and time. Shapes in shares of their area."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

from memopt.reporting.curve import Curve

_WIDTH, _HEIGHT = 2000, 1000
_STEPS = (1, 2, 2.5, 5)
_CAUSES = 6
#: What is below this share of the peak is summed in one row.
_SMALL_OF_PEAK = 0.005


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


def drawn_chart(chart: Chart, top: float, colours: Mapping[str, int]) -> SimpleNamespace:
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
            SimpleNamespace(name=name, at=share(first, found.events), width=share(end - first, found.events))
            for (name, first), end in zip(found.phases, ends, strict=True)
        ],
        x=share(found.moments[found.top] if found.moments else 0, found.events),
        y=share(found.peak, top),
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


def share(part: float, whole: float) -> float:
    return round(100 * part / whole, 2) if whole else 0.0


def ticks(top: float, least: float = 0.0) -> list[SimpleNamespace]:
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
        SimpleNamespace(at=share(value * unit - least, top - least), label=f"{value:g} {name}" if value else "0")
        for value in values
    ]


def peak_rows(charts: Sequence[Chart]) -> list[SimpleNamespace]:
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


def drawn_frontier(frontier: Frontier) -> SimpleNamespace:
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
            x=share(plan.cost - low, (high - low) * 1.1 or 1.0) + 3,
            y=share(plan.nbytes - least, most - least),
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
        y_ticks=ticks(most, least),
        x_ticks=[SimpleNamespace(at=x, label=text) for x, text in sorted((each.x, each.cost) for each in ends)],
    )


def chart_data(chart: Chart, kinds: Mapping[str, str]) -> dict[str, Any]:
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
