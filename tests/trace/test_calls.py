"""Calls of pure functions are followed once for each form: the other calls count as what running them counts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Mamba2Config, PreTrainedConfig, Qwen3_5TextConfig

from memopt.plan.recipe import load_recipe
from memopt.torch_compat import FakeTensorMode
from memopt.trace import calls, followed, trace
from memopt.trace.calls import counted_calls
from memopt.trace.events import Trace
from memopt.trace.timeline import Record, record
from memopt.trace.training import Step, Training
from memopt.walk.models.build import build_meta
from memopt.walk.observe import find_sites
from memopt.walk.sites import FunctionSite


def qwen() -> PreTrainedConfig:
    config = Qwen3_5TextConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=16,
        linear_value_head_dim=16, vocab_size=64,
    )  # fmt: skip
    config.architectures = ["Qwen3_5ForCausalLM"]
    return config


def mamba() -> PreTrainedConfig:
    config = Mamba2Config(
        hidden_size=32, num_hidden_layers=3, num_heads=8, head_dim=8, state_size=8, n_groups=2, vocab_size=64,
        chunk_size=32,
    )  # fmt: skip
    config.architectures = ["Mamba2ForCausalLM"]
    return config


FULL = Training(batch=2, seq=40)
WAYS = [
    (qwen, FULL),
    pytest.param(qwen, replace(FULL, checkpointing="full"), marks=pytest.mark.slow),
    pytest.param(qwen, replace(FULL, train="lora"), marks=pytest.mark.slow),
    pytest.param(qwen, replace(FULL, precision="bf16-mixed"), marks=pytest.mark.slow),
    (mamba, FULL),
    (mamba, replace(FULL, checkpointing="full")),
    (mamba, replace(FULL, train="lora", lora_targets=("in_proj",))),
    (mamba, replace(FULL, precision="bf16-mixed")),
    pytest.param(mamba, replace(FULL, cuda_kernels=False), marks=pytest.mark.slow),
]


@contextlib.contextmanager
def all_run() -> Iterator[None]:
    """Inside, no call is counted: each one runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "counted_calls", lambda *given: contextlib.nullcontext())
        yield


def form(events: Any) -> list[Hashable]:
    """Events in order, by the number of their storage; whose it is aside.

    A trace that runs every call says of some gradients that the next module allocates them: the last views of a
    function allocate nothing by which they could be told from it.
    """
    numbers: dict[Any, int] = {}
    made: list[Hashable] = []
    for allocated, stretch in groupby(events, key=lambda event: bool(event.allocated)):
        found = [
            (
                numbers.setdefault(each := event.storage, len(numbers)),
                *(allocated, event.moment, each.nbytes, each.part, each.operation, each.dtype),
            )
            for event in stretch
        ]
        made += found if allocated else sorted(found)  # frees may be in the order of Python's collector
    return made


def costs(of: Trace) -> list[Hashable]:
    return [(each.moment, each.flops, each.nbytes, each.itemsize) for each in of.operations]


@pytest.mark.parametrize("recipe", [None, "exact-unfolded"])
@pytest.mark.parametrize(("config", "training"), WAYS)
@pytest.mark.rotates(3)
def test_counted_calls_allocate_free_and_compute_what_each_call_does(
    config: Callable[[], PreTrainedConfig], training: Training, recipe: str | None
) -> None:
    made = config()
    step = Step(made, training, find_sites(build_meta(made)), load_recipe(recipe) if recipe else None)
    with all_run():
        every = trace.trace(step)
    counted = trace.trace(step)
    assert form(counted.events) == form(every.events)
    assert costs(counted) == costs(every)


def test_a_form_of_a_call_is_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Any] = []
    stock = followed.Ends.followed

    def follow(ends: Any, run: Any) -> Any:
        runs.append(run)
        return stock(ends, run)

    monkeypatch.setattr(calls, "_known", {})
    monkeypatch.setattr(followed.Ends, "followed", follow)
    made = qwen()
    trace.trace(Step(made, FULL, find_sites(build_meta(made)), None))
    assert len(runs) == 2  # the convolution and the delta rule, of three layers with linear attention


def test_calls_under_checkpointing_are_followed_once_where_they_are_dropped_and_where_they_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    followed_as: list[str] = []
    stock = followed.Ends.followed

    def follow(ends: Any, run: Any) -> Any:
        followed_as.append(ends.call.hooks)
        return stock(ends, run)

    monkeypatch.setattr(calls, "_known", {})
    made = mamba()
    step = Step(made, replace(FULL, checkpointing="full"), find_sites(build_meta(made)), None)
    trace.trace(step)  # finds its arguments first
    monkeypatch.setattr(calls, "_known", {})
    monkeypatch.setattr(followed.Ends, "followed", follow)
    trace.trace(step)
    assert followed_as == ["dropping", "dropping", "keeping", "keeping"]  # the convolution and the scan


def scan(x: Tensor, y: Tensor, repeats: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Each output may be unused; nothing that goes in has a gradient of the last."""
    state = x
    for _ in range(repeats):
        state = (state * y).tanh()
    return state.exp(), state.sigmoid().sum(-1), (y.detach() * 2).requires_grad_()


class Caller(nn.Module):
    """Three times `scan`, of views of one tensor."""

    def __init__(self, uses: str) -> None:
        super().__init__()
        self.linear, self.uses = nn.Linear(8, 16), uses

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for _ in range(3):
            first, second, third = scan(*self.linear(x).chunk(2, -1))
            x = first + x if "first" in self.uses else x
            total = total + second.mean() if "second" in self.uses else total
            total = total + third.mean() if "third" in self.uses else total
        return total + x.mean()


def recorded(uses: str, counts: bool, run: Callable[[nn.Module, Tensor], Tensor] | None = None) -> Record:
    model = Caller(uses)
    sites = [FunctionSite("", ((__name__, "scan"),))] if counts else []
    within = partial(counted_calls, sites, True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for name, parameter in model.linear.named_parameters():
            setattr(model.linear, name, nn.Parameter(torch.empty(parameter.shape)))
        x = torch.empty(4, 8)
        return record(model, lambda: run(model, x) if run else model(x), within=within)


@pytest.mark.parametrize("uses", ["first", "second", "first second", "third"])
def test_a_counted_call_computes_from_the_gradients_that_there_are(uses: str) -> None:
    counted, every = recorded(uses, counts=True), recorded(uses, counts=False)
    assert [each.flops for each in counted.operations] == [each.flops for each in every.operations]
    assert [each.nbytes for each in counted.operations] == [each.nbytes for each in every.operations]
    for found in (counted, every):
        assert all(life.died >= 0 for life in found.events if life not in found.gradients)


def test_what_no_backward_reaches_is_freed_with_its_graph() -> None:
    def run(model: nn.Module, x: Tensor) -> Tensor:
        model(x)
        return x.sum() + model.linear.bias.sum()  # type: ignore[union-attr, operator]

    found = recorded("first", counts=True, run=run)
    alive = [life for life in found.events if life.born < found.forward_ends and life.died == -1]
    assert not alive
