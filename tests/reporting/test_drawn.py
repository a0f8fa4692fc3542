"""A prediction drawn: the chart of the page, and the snapshot for PyTorch's memory viewer. Both show our peak."""

from __future__ import annotations

import pickle
import pickletools
import random
from itertools import accumulate
from typing import Any

import pytest
from torch.cuda import _memory_viz as viewer

from memopt.plan.recipe import load_recipe
from memopt.prediction.peak import Prediction, combine
from memopt.prediction.setup import Setup
from memopt.reporting.charts import chart, thinned
from memopt.reporting.snapshot import snapshot
from memopt.trace.events import Trace
from memopt.trace.trace import trace
from memopt.trace.training import Step, Train, Training
from tests.trace.builders import named_config, sites_of

#: Those that unpickle() of torch/utils/viz/MemoryViz.js knows.
OPCODES = {
    *("PROTO", "FRAME", "MARK", "MEMOIZE", "STOP", "NONE", "NEWTRUE", "NEWFALSE", "BINFLOAT"),
    *("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE"),
    *("BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT"),
    *("EMPTY_LIST", "LIST", "APPEND", "APPENDS", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
}


@pytest.fixture(scope="module")
def traces() -> list[Trace]:
    config, training = named_config("llama"), Training(batch=2, seq=64)
    sites = sites_of(config)
    return [trace(Step(config, training, sites, recipe)) for recipe in (None, load_recipe("exact-unfolded"))]


@pytest.fixture(params=[False, True], ids=["segments", "expandable"])
def predictions(traces: list[Trace], request: pytest.FixtureRequest) -> list[Prediction]:
    return [combine(each, Setup(expandable_segments=request.param)) for each in traces]


def live_bytes(data: dict[str, Any], device: int) -> list[int]:
    """After each event, by the viewer's rule: what no recorded event allocated was there before."""
    events = data["device_traces"][device]
    held = {block["address"]: block for seg in data["segments"] if seg["device"] == device for block in seg["blocks"]}
    there: dict[int, int] = {}
    live = [sum(block["requested_size"] for block in held.values() if block["state"] == "active_allocated")]
    for event in events:
        if event["action"] == "alloc":
            assert event["addr"] not in there
            there[event["addr"]] = event["size"]
            live.append(live[-1] + event["size"])
        elif event["action"] == "free_completed":
            assert there.pop(event["addr"]) == event["size"]
            live.append(live[-1] - event["size"])
    assert not there
    return live


def test_its_peak_is_ours_and_so_is_what_is_reserved(predictions: list[Prediction]) -> None:
    data = pickle.loads(snapshot(*predictions))
    for device, prediction in enumerate(predictions):
        assert max(live_bytes(data, device)) == prediction.peak.nbytes
        segments = [each for each in data["segments"] if each["device"] == device]
        assert sum(each["total_size"] for each in segments) == prediction.reserved


def test_blocks_fill_their_segments_and_no_two_live_ones_overlap(predictions: list[Prediction]) -> None:
    data = pickle.loads(snapshot(*predictions))
    for segment in data["segments"]:
        at = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == at
            assert block["requested_size"] <= block["size"]
            at += block["size"]
        assert at == segment["address"] + segment["total_size"]
    for device, events in enumerate(data["device_traces"]):
        held = [block for seg in data["segments"] if seg["device"] == device for block in seg["blocks"]]
        live = {block["address"]: block["size"] for block in held if block["state"] == "active_allocated"}
        for event in events:
            if event["action"] == "alloc":
                start, end = event["addr"], event["addr"] + event["size"]
                assert not any(at < end and start < at + size for at, size in live.items())
                live[start] = event["size"]
            elif event["action"] == "free_completed":
                del live[event["addr"]]


def test_pytorchs_own_readers_take_it(predictions: list[Prediction]) -> None:
    content = snapshot(*predictions)
    data = pickle.loads(content)
    assert "add_local_files" in viewer.trace_plot(data)
    assert "add_local_files" in viewer.segment_plot(data)
    assert f"segments: {len(data['segments'])}" in viewer.segsum(data)
    assert "Device 1" in viewer.trace(data)
    stacks = viewer.memory(data, format_flamegraph=str)
    assert "active_allocated" in stacks
    assert "weights" in stacks
    assert {opcode.name for opcode, _, _ in pickletools.genops(content)} <= OPCODES


def test_a_block_says_what_it_is_for_and_where_it_was_allocated(predictions: list[Prediction]) -> None:
    data = pickle.loads(snapshot(*predictions))
    names = {frame["name"] for event in data["device_traces"][0] for frame in event["frames"]}
    assert {"saved tensors", "model.layers.0.mlp.act_fn", "gradients"} <= names


def test_the_chart_has_the_predicted_peak_and_its_parts(predictions: list[Prediction]) -> None:
    for prediction in predictions:
        drawn = chart("stock", prediction)
        assert drawn.name == "stock"
        assert drawn.peak == prediction.peak.nbytes == sum(drawn.at_peak.values())
        at_top = {part: values[drawn.top] for part, values in drawn.live.items()}
        assert at_top == prediction.peak.parts
        assert [name for name, _ in drawn.phases] == ["forward", "backward", "optimizer"]
        assert prediction.peak.where in drawn.where


@pytest.mark.parametrize("train", ["full", "lora"])
def test_the_chart_sums_the_storages_of_all_blocks(train: Train) -> None:
    config = named_config("llama")
    found = trace(Step(config, Training(batch=2, seq=64, train=train), sites_of(config)))
    names = {name for _, name in chart("stock", combine(found, Setup())).at_peak}
    assert "blocks" in names
    assert [name for name in names if "layers." in name] == []


@pytest.mark.parametrize("length", [0, 1, 7, 5000])
def test_a_thinned_chart_keeps_the_peak(length: int) -> None:
    draw = random.Random(0)
    changes = [draw.randrange(-(10**6), 10**6) for _ in range(length)]
    totals = list(accumulate(changes))
    shown, top = thinned(changes, limit=40)
    assert len(shown) <= 40 + 1
    assert shown == sorted(shown)
    assert (totals[shown[top]] == max(totals)) if totals else not shown


def test_a_spike_of_one_event_is_shown() -> None:
    """The largest of its span, though not of the step."""
    steady = [100, *(at % 2 * 2 - 1 for at in range(1, 1000))]
    shown, top = thinned([*steady, 50, -50, 1000], limit=10)
    assert shown[top] == 1002
    late, _ = thinned([*steady, 50, -50, *[0] * 998], limit=10)
    assert 1000 in late
