"""Shapes of the page's charts of memory over a step; positions and sizes are percentages of the drawing area."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

_WIDTH, _HEIGHT = 2000, 1000
_STEPS = (1, 2, 2.5, 5)
_CAUSES = 6
#: Storages below this share of the peak are summed in one row.
_SMALL_OF_PEAK = 0.005


@dataclass(frozen=True)
class Chart:
    """Live bytes at some moments of a step, the peak among them; each value holds until the next moment."""

    name: str
    where: str
    """When the peak is, e.g. ``in backward of model.layers.3.mlp``."""
    events: int
    phases: tuple[tuple[str, int], ...]
    """(name, first event) of each phase of the step."""
    moments: tuple[int, ...]
    """Indices of events, ascending."""
    live: Mapping[str, tuple[int, ...]]
    """Bytes of each kind of storage after each of these events, in stacking order."""
    modules: tuple[str, ...]
    """For each of these events, the module that allocated its storage."""
    top: int
    """Index of the peak in `moments`."""
    at_peak: Mapping[tuple[str, str], int]
    """(kind, where) -> live bytes at the peak."""

    @property
    def peak(self) -> int:
        """Bytes that live at the peak."""
        return sum(values[self.top] for values in self.live.values())


def drawn_chart(chart: Chart, top: float, colours: Mapping[str, int]) -> SimpleNamespace:
    stacked = zip(*(accumulate(values) for values in zip(*chart.live.values(), strict=True)), strict=True)
    layers = [
        SimpleNamespace(name=kind, colour=colours[kind], most=max(chart.live[kind]), path=_path(chart, edge, top))
        for kind, edge in zip(chart.live, stacked, strict=True)
        if kind in colours and any(chart.live[kind])
    ]
    ends = [*(first for _, first in chart.phases[1:]), chart.events]
    largest = sorted(chart.at_peak.items(), key=lambda item: -item[1])[:_CAUSES]
    causes = [
        SimpleNamespace(nbytes=nbytes, name=f"{kind}, {where}" if where else kind)
        for (kind, where), nbytes in largest
        if nbytes >= _SMALL_OF_PEAK * chart.peak
    ]
    parts: dict[str, int] = {}
    for (kind, _), nbytes in chart.at_peak.items():
        parts[kind] = parts.get(kind, 0) + nbytes
    return SimpleNamespace(
        name=chart.name,
        peak=chart.peak,
        moment=chart.where,
        width=_WIDTH,
        layers=layers[::-1],  # the highest edge first: each next layer is painted over it
        phases=[
            SimpleNamespace(name=name, at=share(first, chart.events), width=share(end - first, chart.events))
            for (name, first), end in zip(chart.phases, ends, strict=True)
        ],
        x=share(chart.moments[chart.top] if chart.moments else 0, chart.events),
        y=share(chart.peak, top),
        top=chart.top,
        moments=len(chart.moments),
        causes=causes,
        parts=[SimpleNamespace(nbytes=nbytes, name=name) for name, nbytes in parts.items() if nbytes],
    )


def _path(chart: Chart, edge: Iterable[int], top: float) -> str:
    """SVG path of the area below the step function `edge`."""
    steps, last_x, last_y = [f"M0 {_HEIGHT}"], 0, _HEIGHT
    for moment, nbytes in zip(chart.moments, edge, strict=True):
        x, y = round(_WIDTH * moment / chart.events), round(_HEIGHT * (1 - nbytes / top))
        steps.append((f"h{x - last_x}" if x != last_x else "") + (f"v{y - last_y}" if y != last_y else ""))
        last_x, last_y = x, y
    return "".join(steps) + f"H{_WIDTH}V{_HEIGHT}Z"


def share(part: float, whole: float) -> float:
    return round(100 * part / whole, 2) if whole else 0.0


def ticks(top: float, least: float = 0.0) -> list[SimpleNamespace]:
    """About five round sizes up to `top`, each with its position in percent of the height."""
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
    most = max((chart.peak for chart in charts), default=0)
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


def chart_data(chart: Chart, kinds: Container[str]) -> dict[str, Any]:
    """Data of a chart for the page's script; bytes in KiB."""
    shown = [kind for kind in chart.live if kind in kinds]
    return {
        "events": chart.events,
        "phases": chart.phases,
        "top": chart.top,
        "moments": chart.moments,
        "modules": chart.modules,
        "kinds": shown,
        "live": [[round(nbytes / 1024) for nbytes in chart.live[kind]] for kind in shown],
    }
