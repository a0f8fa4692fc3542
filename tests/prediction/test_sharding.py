"""What each of several devices holds, and that every event sequence is whole."""

from __future__ import annotations

from functools import cache
from typing import get_args

import pytest

from memopt.prediction.peak import Prediction, combine, predict
from memopt.prediction.setup import Setup, Sharding
from memopt.prediction.trace import Trace
from memopt.reporting.training import Training
from tests.reporting.builders import named_config, sites_of


@cache
def _trace() -> Trace:
    config = named_config("llama")
    return predict(config, Training(1, 16), sites=sites_of(config)).trace


def shared(sharding: Sharding, devices: int = 4) -> Prediction:
    return combine(_trace(), Setup(sharding=sharding, devices=devices))


def resident(found: Prediction, part: str) -> int:
    return sum(each.nbytes for each in found.resident if each.part == part)


@pytest.mark.parametrize("sharding", get_args(Sharding))
def test_a_step_frees_what_it_allocates_once(sharding: Sharding) -> None:
    live = set()
    for event in shared(sharding).events:
        if event.allocated:
            assert event.storage not in live
            live.add(event.storage)
        else:
            live.remove(event.storage)
    assert not live


def test_ddp_copies_all_gradients_into_buckets() -> None:
    gradients = sum(each.nbytes for each in _trace().gradients)
    assert resident(shared("ddp"), "communication") == gradients > 0
    assert resident(shared("ddp"), "weights") == resident(shared("none"), "weights")


@pytest.mark.parametrize(("sharding", "weights"), [("zero1", 1.0), ("zero2", 1.0), ("fsdp", 0.25)])
def test_weights_and_states_are_divided(sharding: Sharding, weights: float) -> None:
    whole, part = shared("none"), shared(sharding)
    assert resident(part, "weights") == pytest.approx(weights * resident(whole, "weights"), rel=0.02)
    # ZeRO has fp32 states and an fp32 copy of the weights beside bf16 ones: 12 bytes an element for 4.
    states = {"fsdp": 1}.get(sharding, 3) * resident(whole, "optimizer states") / 4
    assert resident(part, "optimizer states") == pytest.approx(states, rel=0.02)


@pytest.mark.parametrize("sharding", ["zero2", "zero3", "fsdp"])
def test_gradients_are_divided_where_they_are(sharding: Sharding) -> None:
    found = shared(sharding)
    freed = [e.storage for e in found.events if not e.allocated and e.moment == "optimizer step"]
    kept = sum(each.nbytes for each in freed if each.part == "gradients" and each.dtype != "float32")
    assert kept == pytest.approx(sum(each.nbytes for each in _trace().gradients) / 4, rel=0.02)


def test_fsdp_gathers_the_rest_and_two_blocks() -> None:
    blocks = dict.fromkeys(_trace().blocks, 0)
    total = 0
    for each in _trace().parameters:
        total += each.nbytes
        for block in blocks:
            if each.name.startswith(f"{block}."):
                blocks[block] += each.nbytes
    gathered = [e.storage.nbytes for e in shared("fsdp").events if e.allocated and e.storage.operation == "all-gather"]
    one = max(blocks.values())
    assert sum(gathered) == pytest.approx(total - sum(blocks.values()) + 3 * one, rel=0.01)
