"""A predicted step as the chart of the HTML page."""

from __future__ import annotations

from collections import Counter

from memopt.prediction.events import PARTS
from memopt.prediction.peak import Prediction
from memopt.reporting.curve import Change, curve
from memopt.reporting.html.page import Chart

_MOMENTS = {"loss": "the loss", "optimizer step": "the optimizer step"}


def chart(name: str, prediction: Prediction) -> Chart:
    """Memory over the second step: all that the process allocates on the device, what lives throughout included."""
    events, resident = prediction.events, Counter[str]()
    for storage in prediction.resident:
        resident[storage.part] += storage.nbytes
    changes = [
        Change(place, event.change, event.storage.part, event.storage.module) for place, event in enumerate(events)
    ]
    phases = [("forward", 0)]
    for phase in ("backward", "optimizer step"):
        begin = next((place for place, event in enumerate(events) if event.moment == phase), None)
        phases += [] if begin is None else [(phase, begin)]
    found = curve(changes, {part: part for part in PARTS}, phases, len(events), resident=resident)
    blocks = tuple(f"{block}." for block in prediction.trace.blocks)
    at_peak = Counter[tuple[str, str]]()
    for storage in (*prediction.resident, *prediction.peak.alive):
        place = "blocks" if f"{storage.module}.".startswith(blocks) else storage.module
        at_peak[storage.part, place] += storage.nbytes
    where = f" of {prediction.where}" if prediction.where else ""
    return Chart(name, found, f"in {_MOMENTS.get(prediction.moment, prediction.moment)}{where}", at_peak)
