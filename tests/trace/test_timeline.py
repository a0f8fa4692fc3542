"""The peak of a step: what lives when, without the gradients of parameters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.kernels.replay import function as replay_function
from memopt.patches.replay import patch_replay
from memopt.torch_compat import FakeTensorMode
from memopt.trace.account import account
from memopt.trace.events import Activations
from memopt.trace.timeline import record
from memopt.trace.trace import activations
from memopt.walk.sites import NormSite
from tests.factories import tiny_inputs, tiny_model

ROWS, WIDTH = 64, 8
VECTOR = ROWS * WIDTH * 4
"""Bytes of one activation."""


def step(model: nn.Module, run: Callable[[], Any]) -> Activations:
    return activations(record(model, run))


class Chain(nn.Module):
    """`length` sines, each of which saves its input."""

    def __init__(self, length: int, *, tied: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last = self.first if tied else nn.Linear(WIDTH, WIDTH, bias=False)
        self.length = length

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x)
        for _ in range(self.length):
            hidden = hidden.sin()
        return SimpleNamespace(loss=self.last(hidden).sum())


@pytest.mark.parametrize("length", [1, 5])
def test_what_forward_keeps_is_counted_once(length: int) -> None:
    model, x = Chain(length), torch.randn(ROWS, WIDTH)
    found = step(model, lambda: model(x))
    assert found.kept == (length + 1) * VECTOR + 4  # the inputs of the sines and of the last linear, and the loss


def test_the_peak_names_the_storages_that_live_then() -> None:
    model, x = Chain(3), torch.randn(ROWS, WIDTH)
    found = step(model, lambda: model(x))
    alive = found.peak.alive
    assert sum(each.nbytes for each in alive) == found.peak.nbytes
    assert found.peak.nbytes > found.kept
    assert {each.part for each in alive} == {"saved tensors", "activation gradients", "temporaries"}
    # In the last sine's backward the input of the last linear has been freed; its cosine is a temporary.
    assert sum(each.nbytes for each in alive if each.part == "saved tensors") == found.kept - VECTOR
    assert found.peak.operation in ("cos", "mul")


def test_a_tensor_that_outlives_its_use_raises_the_peak() -> None:
    model, x = Chain(3), torch.randn(ROWS, WIDTH)
    lean = step(model, lambda: model(x)).peak.nbytes
    model.zero_grad()

    def wasteful() -> Any:
        output = model(x)
        output.kept = torch.zeros(7 * ROWS, WIDTH)
        return output

    assert step(model, wasteful).peak.nbytes == lean + 7 * VECTOR


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_of_parameters_are_left_out(tied: bool) -> None:
    """As wide as they are here, they would be the peak; a tied one is summed up over two uses."""
    wide = 512
    model = Chain(1, tied=tied)
    model.first.weight = nn.Parameter(torch.randn(wide, wide))
    if not tied:
        model.last.weight = nn.Parameter(torch.randn(wide, wide))
    x = torch.randn(2, wide)
    found = step(model, lambda: model(x))
    one_gradient = wide * wide * 4
    # Of a tied weight the second gradient lives beside the sum that it is added to.
    assert (found.peak.nbytes > one_gradient) == tied
    assert found.peak.nbytes < 1.1 * one_gradient
    assert model.first.weight.grad is not None


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("patched", [False, True])
def test_storages_recomputed_in_backward_are_marked_with_their_module(patched: bool, checkpointed: bool) -> None:
    model = tiny_model("llama").train()
    if patched:
        memopt.patch(model)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    inputs = tiny_inputs("llama")
    inputs.pop("labels")
    found = step(model, lambda: model.model(**inputs).last_hidden_state)  # its loss would be the peak
    assert (found.most["recomputed"] > 0) == (patched or checkpointed)
    alive = found.peak.alive
    allocated_in = {each.module for each in alive}
    # Whichever block's backward peaks: what it allocates then is told as its own.
    in_backward = {each.module for each in alive if each.part != "saved tensors" and each.shape}
    assert any(module.startswith("model.layers.") for module in in_backward)
    assert allocated_in <= {"", *dict(model.named_modules())}


class Gated(nn.Module):
    """A norm, times a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * gate


class AroundGated(nn.Module):
    """A gated norm that runs again in backward, between two linears."""

    def __init__(self, *, by_rows: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, 2 * WIDTH), Gated(), nn.Linear(WIDTH, WIDTH)
        patch_replay(self.norm, NormSite("norm", "gated", WIDTH, 0.0, "weight", None, 0, "after", by_rows=by_rows))

    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(loss=self.last(self.norm(*self.first(x).chunk(2, -1))).sum())


def test_pieces_of_a_norm_take_less_and_as_much_on_fake_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_function, "LEAST", 8 * WIDTH)
    peaks = []
    for by_rows, mode in ((False, nullcontext()), (True, nullcontext()), (True, FakeTensorMode())):
        with mode:
            model, x = AroundGated(by_rows=by_rows), torch.randn(ROWS, WIDTH)
            peaks.append(step(model, lambda model=model, x=x: model(x)).peak.nbytes)  # type: ignore[misc]
    whole, by_pieces, of_fake = peaks
    assert by_pieces == of_fake
    assert by_pieces < whole - 2 * VECTOR


def test_allocations_of_a_function_that_backward_runs_again_have_its_module() -> None:
    model = AroundGated()
    x = torch.randn(ROWS, WIDTH)
    found = record(model, lambda: model(x))
    backward = {life for life in found.events[found.forward_ends :] if life.born >= found.forward_ends}
    of_rows = {life for life in backward if life.nbytes >= VECTOR and life not in found.gradients}
    parts = {(life.module, found.part_of(life, found.forward_ends)) for life in of_rows}
    of_norm = {("norm", "recomputed"), ("norm", "activation gradients"), ("norm", "temporaries")}
    assert parts == of_norm | {("last", "activation gradients")}


@pytest.mark.parametrize("patched", [False, True])
def test_the_most_bytes_before_backward_are_what_the_account_keeps(patched: bool) -> None:
    """Seen without hooks and through them, but for the output, which the account lets go."""
    model = tiny_model("llama").train()
    if patched:
        memopt.patch(model)
    inputs = tiny_inputs("llama")

    def run() -> Any:
        output = model(**inputs)
        return output.loss

    assert step(model, run).kept == account(model, run).total + 4  # the loss


def test_logits_count_as_such_and_a_gradient_of_their_weight_does_not() -> None:
    model = tiny_model("llama").train()
    inputs = tiny_inputs("llama")
    found = step(model, lambda: model(**inputs))
    vocabulary = model.config.vocab_size
    shapes = {each.shape[-1] for each in found.peak.alive if each.part == "loss"}
    assert shapes == {vocabulary}
    rows = inputs["input_ids"].numel()
    assert found.most["loss"] == 4 * rows * vocabulary * 4  # logits, softmax, and two gradients, all in fp32
