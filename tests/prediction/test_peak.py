"""The predicted peak of a whole step is the one that real tensors have."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from memopt.errors import UsageError
from memopt.prediction.optimizers import OptimizerTrace, _repeated, _step, follow, make_optimizer
from memopt.prediction.peak import Prediction, predict
from memopt.prediction.planner.plan import _fits_expandable
from memopt.prediction.setup import Setup
from memopt.trace.events import Event, Storage, peak_of
from memopt.trace.timeline import Timeline
from memopt.trace.training import Step, Training
from tests.trace.builders import named_config, sites_of

MIB = 1 << 20


def predicted(name: str, setup: Setup | None = None, **training: Any) -> Prediction:
    config = named_config(name)
    sizes = {"batch": 2, "seq": 24, "precision": "fp32", "cuda_kernels": False, **training}
    return predict(Step(config, Training(**sizes), sites_of(config)), setup)


@pytest.mark.parametrize("others", [{"accumulation": 2}, {"devices": 2, "sharding": "ddp"}, {"optimizer": "muon"}])
def test_gradients_that_others_need_are_not_released(others: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="on one device, without accumulation, and not by muon or adamw-offload"):
        Setup(release_gradients=True, **others)


def test_a_step_frees_what_it_allocates_and_its_parts_add_up_to_the_peak() -> None:
    found = predicted("llama")
    assert sum(event.change for event in found.events) == 0
    assert sum(found.peak.parts.values()) == found.peak.nbytes
    at_peak = sum(each.nbytes for each in (*found.resident, *found.peak.alive))
    assert at_peak == found.peak.nbytes


def test_adamw_keeps_two_states_an_element_and_foreach_a_copy_of_the_weights_in_its_step() -> None:
    forms = (((32, 16), torch.bfloat16), ((16,), torch.bfloat16))
    count = 32 * 16 + 16
    foreach, fused = (follow(forms, Setup(name)) for name in ("adamw-foreach", "adamw-fused"))
    assert sum(each.nbytes for each in foreach.states) == 2 * 2 * count
    assert sum(each.nbytes for each in fused.states) == 2 * 2 * count + 2 * 4  # the number of steps is on the device
    assert max(_live(foreach.events)) == 2 * count
    assert not fused.events


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("optimizer", ["adamw-foreach", "sgd", "adafactor"])
def test_an_optimizers_allocations_on_meta_are_those_on_real_tensors(optimizer: Any, foreach: bool) -> None:
    setup = Setup(optimizer)
    forms = (((8, 4), torch.float32), ((3,), torch.bfloat16), ((4, 8), torch.float32), ((3,), torch.bfloat16))
    parameters = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape, dtype in forms]
    real = make_optimizer(parameters, setup, foreach=foreach)
    for each in parameters:
        each.grad = torch.ones_like(each)
    real.step()
    timeline = Timeline(torch.nn.ParameterList(parameters))
    with timeline:
        real.step()
    found = follow(forms, setup, foreach)
    assert [(each.allocated, each.storage.nbytes, each.storage.operation) for each in found.events] == [
        (life.born == at, life.nbytes, life.birth.operation)
        for at, life in enumerate(timeline.events)
        if life.died >= 0
    ]
    states = [each for state in real.state.values() for each in state.values() if isinstance(each, torch.Tensor)]
    on_device = [each for each in states if each.dim() or not foreach]  # numbers of steps
    kept = [each for each in found.states if each.part == "optimizer states"]
    assert sorted(each.nbytes for each in kept) == sorted(each.nbytes for each in on_device)


@pytest.mark.parametrize("setup", [Setup("adamw-foreach"), Setup("sgd")])
def test_two_parameters_of_each_form_tell_what_a_foreach_step_allocates_for_many(setup: Setup) -> None:
    one, other, third = ((8, 4), torch.float32), ((3,), torch.bfloat16), ((4, 8), torch.float32)
    forms = (one, other, third, one, one, other, one, third)
    few = (one, other, third, one, other, third)
    extended = _repeated(_step(few, setup, True), few, forms)
    assert extended is not None
    assert _described(extended) == _described(_step(forms, setup, True))


def test_eight_bit_states_have_a_statistic_for_256_codes_and_small_tensors_stay_in_fp32() -> None:
    forms = (((64, 64), torch.bfloat16), ((4095,), torch.bfloat16))
    found = follow(forms, Setup("adamw8bit"))
    assert sum(each.nbytes for each in found.states) == 2 * (4096 + 4 * 16) + 2 * 4 * 4095 + 2 * 4 * 256


def test_the_fused_step_keeps_what_the_real_one_keeps() -> None:
    forms = (((8, 4), torch.float32), ((3,), torch.bfloat16))
    parameters = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape, dtype in forms]
    real = make_optimizer(parameters, Setup(), foreach=True)
    for each in parameters:
        each.grad = torch.ones_like(each)
    real.step()
    timeline = Timeline(torch.nn.ParameterList(parameters))
    with timeline:
        real.step()
    assert [life for life in timeline.events if life.died >= 0] == []
    states = [each.nbytes for state in real.state.values() for each in state.values()]
    assert sorted(states) == sorted(each.nbytes for each in follow(forms, Setup()).states)


#: A matrix, a tensor too small for 8 bits, and one that is not paged; bf16.
FORMS = (((512, 256), torch.bfloat16), ((4095,), torch.bfloat16), ((8192,), torch.bfloat16))
N, SMALL, MIDDLE = 512 * 256, 4095, 8192


@pytest.mark.parametrize(
    ("optimizer", "states", "transients"),
    [
        ("adamw-paged", 8 * (SMALL + MIDDLE), 0),
        ("adamw8bit-paged", 2 * 4 * N // 256 + 8 * SMALL + 2 * (MIDDLE + 4 * 32) + 2 * 1024, 0),
        ("adamw-offload", 4 * SMALL + 4, 0),
        ("adamw8bit-torchao", 2 * (N + MIDDLE) + 8 * (N + MIDDLE) // 256 + 4 * 1024 + 4 * SMALL, 8 * N),
        ("adamw4bit-torchao", (N + MIDDLE) + 8 * (N + MIDDLE) // 256 + 4 * 64 + 4 * SMALL, 26 * N),
        ("flash-adamw", 3 * (N + SMALL + MIDDLE) + 4 * (N // 32 + 128 + 256), 0),
    ],
)
def test_the_states_of_other_packages_are_those_of_their_code(optimizer: Any, states: int, transients: int) -> None:
    found = follow(FORMS, Setup(optimizer))
    assert sum(each.nbytes for each in found.states) == states
    assert max(_live(found.events)) == transients
    assert _live(found.events)[-1] == 0


@pytest.mark.parametrize("tied", [True, False])
def test_trainer_keeps_the_eight_bit_states_of_embeddings_in_fp32(tied: bool) -> None:
    config = named_config("llama", vocab_size=2048, tie_word_embeddings=tied)
    step = Step(config, Training(seq=24), sites_of(config))
    wide, narrow = (
        sum(each.nbytes for each in predict(step, Setup("adamw8bit", by_trainer=by)).resident if "states" in each.part)
        for by in (True, False)
    )
    elements = 2048 * config.hidden_size
    assert wide - narrow == 2 * (4 * elements - elements - 4 * elements // 256)


def test_paged_states_of_embeddings_are_not_counted() -> None:
    form = ((1000, 256), torch.bfloat16)
    found = follow((form,), Setup("adamw8bit-paged"), True, (True,))
    assert [each.nbytes for each in found.states] == [1024, 1024]  # the two maps alone


def test_muon_steps_the_matrices_of_blocks_one_by_one_and_adamw_the_rest() -> None:
    forms = (
        ((64, 32), torch.bfloat16),
        ((64, 32), torch.bfloat16),
        ((32,), torch.bfloat16),
        ((16, 48), torch.bfloat16),
    )
    found = follow(forms, Setup("muon"), True, (False, True, True, True))
    kept = 2 * 2 * 64 * 32 + 4 + 2 * 2 * 32 + 4 + 2 * 64 * 32 + 2 * 16 * 48
    assert sum(each.nbytes for each in found.states) == kept
    real = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape, dtype in (forms[1], forms[3])]
    optimizer = make_optimizer(real, Setup("muon"), foreach=True)
    for each in real:
        each.grad = torch.ones_like(each)
    optimizer.step()
    timeline = Timeline(torch.nn.ParameterList(real))
    with timeline:
        optimizer.step()
    lives = [life for at, life in enumerate(timeline.events) if life.born == at and life.died >= 0]
    assert [event.storage.nbytes for event in found.events if event.allocated] == [life.nbytes for life in lives]


def test_gradients_live_in_forward_only_while_they_accumulate() -> None:
    once, twice = predicted("llama"), predicted("llama", Setup(accumulation=2))
    assert not any(each.part == "gradients" for each in once.resident)
    trained = sum(each.nbytes for each in once.trace.parameters if each.trained)
    assert sum(each.nbytes for each in twice.resident if each.part == "gradients") == trained


@pytest.mark.parametrize(
    ("setup", "why"),
    [
        ({"devices": -2}, r"Devices \(-2\)"),
        ({"accumulation": 0}, r"micro-batches \(0\)"),
        ({"sharding": "fsdp"}, "more than one device"),
        ({"sharding": "zero2", "devices": 2, "optimizer": "adafactor"}, "zero2.*not for adafactor"),
        ({"sharding": "zero3", "devices": 2, "optimizer": "adamw8bit"}, "zero3.*not for adamw8bit"),
        ({"sharding": "fsdp", "devices": 2, "optimizer": "muon"}, "muon.*FSDP divides"),
    ],
)
def test_a_setup_that_has_no_formula_is_refused(setup: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Setup(**setup)


def _described(trace: OptimizerTrace) -> list[Any]:
    numbers = {event.storage: at for at, event in enumerate(trace.events) if event.allocated}
    each = [(event.allocated, numbers[event.storage], event.storage) for event in trace.events]
    states = [(True, 0, storage) for storage in trace.states]
    return [(*what, s.nbytes, s.part, s.operation, s.dtype, s.shape) for *what, s in (*states, *each)]


def _live(events: Any) -> list[int]:
    live = [0]
    for event in events:
        live.append(live[-1] + event.change)
    return live


@pytest.fixture(scope="module")
def fragmenting() -> Prediction:
    """A step whose segments fit 212 MiB, but not 214 to 246 MiB, where they are released later."""
    found, chance = predicted("llama", cuda_kernels=True), random.Random(31)
    events: list[Event] = []
    alive: list[Storage] = []
    for _ in range(50):
        if alive and chance.random() < len(alive) / 8:
            events.append(Event(alive.pop(chance.randrange(len(alive))), False, "backward"))
        else:
            alive.append(Storage(chance.randrange(1, 40) * MIB, "temporaries"))
            events.append(Event(alive[-1], True, "forward"))
    events += [Event(each, False, "backward") for each in alive]
    return replace(found, resident=(), events=tuple(events), peak=peak_of((), events))


def on_device(of: Prediction, memory: int) -> Prediction:
    return replace(of, setup=replace(of.setup, memory=memory))


def test_what_fits_a_device_fits_every_larger_one(fragmenting: Prediction) -> None:
    sizes = range(fragmenting.context, fragmenting.context + 1000 * MIB, 2 * MIB)
    devices = [on_device(fragmenting, size) for size in sizes]
    fits = [each.needs <= size for each, size in zip(devices, sizes, strict=True)]
    assert fits == sorted(fits)
    assert set(fits) == {False, True}
    too_small = {each.needs for each, does in zip(devices, fits, strict=True) if not does}
    (needs,) = too_small
    assert on_device(fragmenting, needs).needs <= needs
    lowered = [each for each in devices if each.limit_advice]
    assert lowered
    assert all(each.needs <= each.setup.memory < each.usual + each.context + each.margin for each in lowered)  # type: ignore[operator]
    asked = re.search(r"set_per_process_memory_fraction\((\d+) / ", lowered[0].limit_advice)
    assert asked is not None
    cards = range(8_000_000_000, 90_000_000_000, 7_654_321)  # PyTorch rounds a fraction of a card's bytes down
    assert all(int(int(asked[1]) / card * card) >= lowered[0].reserved for card in cards)
    assert "expandable_segments:True" in lowered[0].limit_advice


def test_a_refused_step_that_expandable_segments_would_fit_is_found(fragmenting: Prediction) -> None:
    for size, fits in ((190, False), (205, True)):
        limit = fragmenting.context + size * MIB
        refused = on_device(fragmenting, fragmenting.context + round(1.03 * size * MIB))
        assert refused.total > limit
        assert _fits_expandable(refused, limit) is fits
