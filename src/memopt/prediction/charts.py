"""The predicted steps of a report, and each as a chart of its HTML page."""

from __future__ import annotations

from collections import Counter

from memopt.prediction.events import PARTS
from memopt.prediction.peak import Prediction, combine
from memopt.prediction.planner.choice import Frontier
from memopt.prediction.setup import Setup
from memopt.prediction.tracer import Tracer
from memopt.reporting.compare import Comparison
from memopt.reporting.curve import Change, curve
from memopt.reporting.headline import Headline
from memopt.reporting.html.page import PageTable, size
from memopt.reporting.html.shapes import Chart, Plan
from memopt.reporting.html.shapes import Frontier as FrontierChart

_MOMENTS = {"loss": "the loss", "optimizer step": "the optimizer step"}


def predictions(comparison: Comparison, setup: Setup) -> list[Prediction]:
    """The step of the stock and of the patched model.

    Raises:
        ModelError: one of them cannot be traced.
    """
    of = comparison.step
    assert of is not None, "a comparison by compare_training has one"
    return [combine(Tracer(way).at(of.training), setup) for way in (of.stock, of)]


def chart(name: str, prediction: Prediction) -> Chart:
    """Memory over the second step: all that the process allocates on the device, what lives throughout included."""
    events, resident = prediction.events, Counter[str]()
    for storage in prediction.resident:
        resident[storage.part] += storage.nbytes
    changes = [
        Change(place, event.change, event.storage.part, event.storage.module) for place, event in enumerate(events)
    ]
    phases = [("forward", 0)]
    for phase, moment in (("backward", "backward"), ("optimizer", "optimizer step")):
        begin = next((place for place, event in enumerate(events) if event.moment == moment), None)
        phases += [] if begin is None else [(phase, begin)]
    found = curve(changes, {part: part for part in PARTS}, phases, len(events), resident=resident)
    blocks = tuple(f"{block}." for block in prediction.trace.blocks)
    at_peak = Counter[tuple[str, str]]()
    for storage in (*prediction.resident, *prediction.peak.alive):
        place = "blocks" if f"{storage.module}.".startswith(blocks) else storage.module
        at_peak[storage.part, place] += storage.nbytes
    where = f" of {prediction.where}" if prediction.where else ""
    return Chart(name, found, f"in {_MOMENTS.get(prediction.moment, prediction.moment)}{where}", at_peak)


def frontier_chart(found: Frontier) -> FrontierChart:
    """The planner's frontier as that of the page."""
    plans = [Plan(point.words, point.total, point.extra, f"{point.extra:+.1%}") for point in found.points]
    caption = f"Plans that no other beats in both memory and time, by the rates of {found.card}; all of them are exact."
    return FrontierChart(caption, "Extra time", plans)


def ways_table(headline: Headline) -> PageTable:
    """The ways to train, beside each other."""
    rows: list[list[tuple[str, float | None]]] = []
    has_batch = any(way.batch is not None for way in headline.ways())
    for way in headline.ways():
        fits = headline.memory is not None and way.fits(headline.memory)
        exact = f"approximate, off by up to {way.gradient_error:.0%}" if way.gradient_error else "exact"
        rows.append(
            [
                (way.name, None),
                (size(way.total), way.total),
                *([("yes" if fits else "no", None)] if headline.memory is not None else []),
                (f"{way.flops - 1:+.0%}", way.flops),
                (f"{way.moved - 1:+.0%}", way.moved),
                *([("" if way.batch is None else str(way.batch), way.batch.value if way.batch else 0)] * has_batch),
                (exact, None),
            ]
        )
    card = [] if headline.memory is None else [f"Fits {headline.card}"]
    return PageTable(
        "Ways to train",
        ["Way", "Peak", *card, "FLOPs", "Bytes moved", *["Largest batch"] * has_batch, "Gradients"],
        rows,
    )
