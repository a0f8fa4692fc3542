"""The predicted steps of a report, and the charts of its HTML page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from types import SimpleNamespace

from memopt.prediction.headline import Headline
from memopt.prediction.peak import Prediction, combine
from memopt.prediction.planner.choice import Frontier
from memopt.prediction.setup import Setup
from memopt.reporting.compare import Comparison
from memopt.reporting.html.shapes import Chart, share, ticks
from memopt.reporting.terminal import WORDS, columns
from memopt.trace.events import PARTS, Part
from memopt.trace.trace import trace
from memopt.walk.models.alike import places

#: The most moments in a chart: two for each column of a chart that is a few hundred columns wide.
_SHOWN = 600
_MOMENTS = {"loss": "the loss", "optimizer step": "the optimizer step"}


def predictions(comparison: Comparison, setup: Setup) -> list[Prediction]:
    """The predictions for the stock and the patched model; a ModelError if one of the two cannot be traced."""
    of = comparison.step
    assert of is not None, "a comparison by compare_training has one"
    ways = ((of.stock, comparison.before.trace), (of, comparison.after.trace))
    return [combine(trace(way) if known is None else known, setup) for way, known in ways]


def chart(name: str, prediction: Prediction) -> Chart:
    """Chart of memory over the second step: all storages of the process on the device, also the lasting ones."""
    events, now = prediction.events, dict.fromkeys(PARTS, 0)
    for storage in prediction.resident:
        now[storage.part] += storage.nbytes
    shown, top = thinned([event.change for event in events])
    live: dict[Part, list[int]] = {part: [] for part in PARTS}
    drawn = set(shown)
    for number, event in enumerate(events):
        now[event.storage.part] += event.change
        if number in drawn:
            for part, values in live.items():
                values.append(now[part])
    phases = [("forward", 0)]
    for phase, moment in (("backward", "backward"), ("optimizer", "optimizer step")):
        begin = next((place for place, event in enumerate(events) if event.moment == moment), None)
        phases += [] if begin is None else [(phase, begin)]
    block_of = places(prediction.trace.blocks)
    at_peak = Counter[tuple[str, str]]()
    for storage in (*prediction.resident, *prediction.peak.alive):
        place = "blocks" if block_of(storage.module) >= 0 else storage.module
        at_peak[storage.part, place] += storage.nbytes
    peak = prediction.peak
    where = f" of {peak.where}" if peak.where else ""
    return Chart(
        name,
        f"in {_MOMENTS.get(peak.moment, peak.moment)}{where}",
        len(events),
        tuple(phases),
        tuple(shown),
        {part: tuple(values) for part, values in live.items()},
        tuple(events[number].storage.module for number in shown),
        top,
        at_peak,
    )


def thinned(changes: Sequence[int], limit: int = _SHOWN) -> tuple[list[int], int]:
    """(indices of the `changes` of bytes that a chart shows, index of the peak among them). Of each of limit/2 spans,
    the moments with the most and the fewest live bytes are shown, so that neither the peak nor a spike is lost."""
    totals = list(accumulate(changes))
    span = -(-2 * len(changes) // limit) or 1
    shown = set(range(len(changes))[:1])
    for start in range(0, len(changes), span):
        places = range(start, min(start + span, len(changes)))
        shown |= {max(places, key=totals.__getitem__), min(places, key=totals.__getitem__)}
    chosen, top = sorted(shown), max(range(len(totals)), key=totals.__getitem__, default=0)
    return chosen, chosen.index(top) if chosen else 0


def drawn_frontier(found: Frontier) -> SimpleNamespace:
    """The planner's frontier for the page."""
    plans = sorted(found.points, key=lambda plan: plan.total)
    costs, sizes = [plan.extra for plan in plans], [plan.total for plan in plans]
    low, high = min(costs), max(costs)
    least, most = 0.9 * min(sizes), 1.05 * max(sizes)
    points = [
        SimpleNamespace(
            name=plan.words,
            nbytes=plan.total,
            cost=f"{plan.extra:+.1%}",
            sort=plan.extra,
            x=share(plan.extra - low, (high - low) * 1.1 or 1.0) + 3,
            y=share(plan.total - least, most - least),
        )
        for plan in plans
    ]
    ends = {points[0].cost: points[0], points[-1].cost: points[-1]}.values()
    places = [f"{10 * point.x:g} {1000 - 10 * point.y:g}" for point in points]
    return SimpleNamespace(
        caption=f"Plans that no other beats in both memory and time, by the rates of {found.card}; "
        "all of them are exact.",
        points=points,
        path="M" + "L".join(places),
        y_ticks=ticks(most, least),
        x_ticks=[SimpleNamespace(at=x, label=text) for x, text in sorted((each.x, each.cost) for each in ends)],
    )


def ways_table(headline: Headline) -> SimpleNamespace:
    """A table of the ways to train: heads, and rows of (text, value by which the column is sorted)."""
    found = columns(headline)
    return SimpleNamespace(
        title="Ways to train",
        heads=[SimpleNamespace(name=name, number=name not in WORDS) for name in found],
        rows=[
            [SimpleNamespace(text=text, sort=sort) for text, sort in (cell(way) for cell in found.values())]
            for way in headline.ways()
        ],
    )
