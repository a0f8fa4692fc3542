"""What each of several devices holds, and that every event sequence is whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import get_args

import pytest
import torch
from torch import distributed
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaForCausalLM

from memopt.prediction.peak import Prediction, combine, predict
from memopt.prediction.setup import Setup, Sharding
from memopt.trace.events import Trace
from memopt.trace.training import Precision, Step, Training
from tests.trace.builders import named_config, sites_of


@cache
def _trace() -> Trace:
    config = named_config("llama")
    return predict(Step(config, Training(1, 16), sites_of(config))).trace


@pytest.fixture
def fake_group() -> Iterator[DeviceMesh]:
    distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (4,))
    distributed.destroy_process_group()


def shared(sharding: Sharding, devices: int = 4) -> Prediction:
    return combine(_trace(), Setup(sharding=sharding, devices=1 if sharding == "none" else devices))


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


@pytest.mark.parametrize("sizes", [(1, 16), (4, 128)], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_the_peak_under_fsdp_is_that_of_pytorchs_tracker(
    fake_group: DeviceMesh, precision: Precision, sizes: tuple[int, int]
) -> None:
    """With mixed precision, as accelerate sets it, a gathered block more may be counted."""
    config = named_config("llama", num_hidden_layers=4, hidden_size=256, intermediate_size=688)
    found = predict(
        Step(config, Training(*sizes, precision=precision, cuda_kernels=False), sites_of(config)),
        Setup(sharding="fsdp", devices=fake_group.size()),
    )
    model = LlamaForCausalLM(config).train()
    mixed = precision == "bf16-mixed"
    dtype = torch.bfloat16 if mixed else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype)
    for block in model.model.layers:
        fully_shard(block, mesh=fake_group, mp_policy=policy)
    fully_shard(model, mesh=fake_group, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    ids = torch.full(sizes, 3)
    tracker = FSDPMemTracker(model, optimizer)
    tracker.track_inputs((ids,))
    with tracker:
        for _ in range(2):  # the second step has the optimizer's states
            tracker.reset_mod_stats()
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                output = model(input_ids=ids, labels=ids)
            output.loss.backward()
            del output
            optimizer.step()
            optimizer.zero_grad()
    measured = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    block = 2 * sum(each.numel() for each in LlamaForCausalLM(config).model.layers[0].parameters())
    assert -0.01 * measured <= found.peak.nbytes - measured <= 0.01 * measured + mixed * block


@pytest.mark.parametrize("sharding", ["zero1", "zero2", "zero3"])
def test_while_gradients_accumulate_their_fp32_copies_do_not_live(sharding: Sharding) -> None:
    found = combine(_trace(), Setup(sharding=sharding, devices=4, accumulation=2))
    parts = 4 if sharding != "zero1" else 1
    gradients = sum(each.nbytes for each in _trace().gradients)
    assert resident(found, "gradients") == pytest.approx(gradients / parts, rel=0.02)
    copies = [e for e in found.events if e.storage.operation == "fp32 gradients"]
    assert [(e.allocated, e.moment) for e in copies] == [(True, "optimizer step"), (False, "optimizer step")]


def test_zero3_gathers_frozen_weights_in_their_own_dtype() -> None:
    """As with LoRA: the weights are bf16 and frozen, and the adapters fp32."""
    large = [
        replace(each, shape=(1000, 1000), nbytes=2 * 10**6, trained=False, is_buffer=False)
        for each in _trace().parameters
    ]
    adapter = replace(large[0], name="adapter", shape=(8, 8), dtype=torch.float32, nbytes=256, trained=True)
    gathered = {}
    for count in (len(large), 3000):  # 3000 million elements are more than DeepSpeed gathers at once
        parameters = (*(large * count)[:count], adapter)
        found = combine(replace(_trace(), parameters=parameters), Setup(sharding="zero3", devices=4))
        gathered[count] = resident(found, "communication") - 500_000_000 * 4
    assert gathered == {len(large): 2 * 10**6 * len(large), 3000: 1_050_000_000 * 2}


def test_buffers_are_not_divided() -> None:
    parameters = tuple(replace(each, is_buffer=True) for each in _trace().parameters)
    trace = replace(_trace(), parameters=parameters)
    for sharding in ("zero3", "fsdp"):
        part = combine(trace, Setup(sharding=sharding, devices=4))
        assert resident(part, "weights") == resident(shared("none"), "weights")


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
    # Two in forward, and one more for each block that backward runs but for the last two, which are gathered by then.
    assert sum(gathered) == pytest.approx(total - sum(blocks.values()) + len(blocks) * one, rel=0.01)
