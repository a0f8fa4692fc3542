"""The live bytes of a step over its events, thinned."""

from __future__ import annotations

import random

import pytest

from memopt.reporting.curve import Change, curve, step_curve
from memopt.reporting.timeline import step
from tests.factories import tiny_inputs, tiny_model


def changes_of_a_random_walk(length: int) -> list[Change]:
    draw, live, found = random.Random(0), [], []
    for moment in range(length):
        if live and draw.random() < 0.5:
            nbytes, kind = live.pop(draw.randrange(len(live)))
            found.append(Change(moment, -nbytes, kind, ""))
        else:
            live.append((draw.randrange(1, 10**6), draw.choice("ab")))
            found.append(Change(moment, *live[-1], ""))
    return found


@pytest.mark.parametrize("length", [0, 1, 7, 5000])
def test_a_thinned_curve_keeps_the_peak_and_true_values(length: int) -> None:
    changes = changes_of_a_random_walk(length)
    full = curve(changes, {"a": "", "b": ""}, (), length, limit=10**6)
    thin = curve(changes, {"a": "", "b": ""}, (), length, limit=40)
    assert len(thin.moments) <= 40 + 1
    assert thin.peak == full.peak
    assert set(zip(thin.moments, *thin.live.values(), strict=True)) <= set(
        zip(full.moments, *full.live.values(), strict=True)
    )


def test_a_spike_of_one_event_is_shown() -> None:
    """The largest of its span, though not of the step."""
    steady = [Change(0, 100, "a", ""), *(Change(at, at % 2 * 2 - 1, "a", "") for at in range(1, 1000))]
    spike = [Change(1000, 50, "a", "here"), Change(1001, -50, "a", "here"), Change(1002, 1000, "a", "")]
    thin = curve([*steady, *spike], {"a": ""}, (), 1003, limit=10)
    assert (thin.live["a"][thin.top], thin.moments[thin.top]) == (1101, 1002)
    late = curve([*steady, *spike[:2], *(Change(at, 0, "a", "") for at in range(1002, 2000))], {"a": ""}, (), 2000, 10)
    assert "here" in late.modules


def test_the_curve_of_a_step_has_its_peak_and_its_parts() -> None:
    model, inputs = tiny_model("llama").train(), tiny_inputs("llama")
    found = step(model, lambda: model(**inputs))
    thin = step_curve(found, limit=60)
    assert thin.peak == found.peak
    assert thin.moments[thin.top] == found.top
    alive = {kind: sum(life.nbytes for life, of in found.at_peak if of == kind) for kind in thin.kinds}
    assert {kind: values[thin.top] for kind, values in thin.live.items()} == alive
    ends = next(place for place, moment in enumerate(thin.moments) if moment >= found.forward_ends)
    assert sum(values[ends] for values in thin.live.values()) >= found.kept * 0.9
