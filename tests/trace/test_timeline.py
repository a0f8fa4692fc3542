"""The peak of a step: what lives when, without the gradients of parameters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.trace.account import account
from memopt.trace.timeline import step
from tests.factories import tiny_inputs, tiny_model

ROWS, WIDTH = 64, 8
VECTOR = ROWS * WIDTH * 4
"""Bytes of one activation."""


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
    assert sum(each.nbytes for each, _ in found.at_peak) == found.peak
    assert found.peak > found.kept
    assert {kind for _, kind in found.at_peak} == {"saved", "gradients", "temporaries"}
    # In the last sine's backward the input of the last linear has been freed; its cosine is a temporary.
    assert sum(each.nbytes for each, kind in found.at_peak if kind == "saved") == found.kept - VECTOR
    assert found.last is not None
    assert found.last.birth.operation in ("cos", "mul")


def test_a_tensor_that_outlives_its_use_raises_the_peak() -> None:
    model, x = Chain(3), torch.randn(ROWS, WIDTH)
    lean = step(model, lambda: model(x)).peak
    model.zero_grad()

    def wasteful() -> Any:
        output = model(x)
        output.kept = torch.zeros(7 * ROWS, WIDTH)
        return output

    assert step(model, wasteful).peak == lean + 7 * VECTOR


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
    assert (found.peak > one_gradient) == tied
    assert found.peak < 1.1 * one_gradient
    assert model.first.weight.grad is not None


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("patched", [False, True])
def test_what_backward_recomputes_is_told_and_in_which_module(patched: bool, checkpointed: bool) -> None:
    model = tiny_model("llama").train()
    if patched:
        memopt.patch(model)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    inputs = tiny_inputs("llama")
    inputs.pop("labels")
    found = step(model, lambda: model.model(**inputs).last_hidden_state)  # its loss would be the peak
    assert (found.most["recomputed"] > 0) == (patched or checkpointed)
    allocated_in = {life.module for life, _ in found.at_peak}
    # Whichever block's backward peaks: what it allocates then is told as its own.
    in_backward = {life.module for life, kind in found.at_peak if kind != "saved" and life.birth.shape}
    assert any(module.startswith("model.layers.") for module in in_backward)
    assert allocated_in <= {"", *dict(model.named_modules())}


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
    shapes = {life.birth.shape[-1] for life, kind in found.at_peak if kind == "logits"}
    assert shapes == {vocabulary}
    rows = inputs["input_ids"].numel()
    assert found.most["logits"] == 4 * rows * vocabulary * 4  # logits, softmax, and two gradients, all in fp32
