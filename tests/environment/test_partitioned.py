"""Models whose parameters DeepSpeed's ZeRO-3 has partitioned when `memopt.patch` sees them."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt.errors import ModelError
from tests.factories import tiny_inputs, tiny_model


class Gathered:
    """What `deepspeed.zero.GatheredParameters` does, with the whole in place of the shards."""

    largest = 0

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)

    def __enter__(self) -> None:
        for parameter in self.parameters:
            parameter.data = parameter.whole  # type: ignore[attr-defined]
        Gathered.largest = max(Gathered.largest, sum(p.numel() for p in self.parameters))

    def __exit__(self, *error: Any) -> None:
        for parameter in self.parameters:
            parameter.data = torch.empty(0)


def partition(model: nn.Module) -> None:
    for number, parameter in enumerate(model.parameters()):
        mine: Any = parameter
        mine.ds_id, mine.ds_shape, mine.whole = number, parameter.shape, parameter.data
        parameter.data = torch.empty(0)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_partitioned_model_is_patched_as_the_whole_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    zero = types.SimpleNamespace(GatheredParameters=Gathered)
    monkeypatch.setitem(sys.modules, "deepspeed", types.SimpleNamespace(zero=zero))  # type: ignore[arg-type]
    whole, model = memopt.patch(tiny_model(name)), tiny_model(name)
    size = sum(p.numel() for p in model.parameters())
    partition(model)
    monkeypatch.setattr(Gathered, "largest", 0)
    memopt.patch(model)
    assert str(memopt.summary(model)) == str(memopt.summary(whole))
    assert all(parameter.numel() == 0 for parameter in model.parameters())
    assert 0 < Gathered.largest < size / 2  # one module at a time, never a block or the model
    with Gathered(model.parameters()):
        inputs = tiny_inputs(name)
        assert torch.equal(model(**inputs).loss, whole(**inputs).loss)


def test_empty_parameters_of_another_tool_are_named_with_the_remedy() -> None:
    model = tiny_model("llama")
    for parameter in model.parameters():
        parameter.data = torch.empty(0)
    with pytest.raises(ModelError, match=r"parameters of LlamaForCausalLM are empty here.*Patch the model before"):
        memopt.patch(model)
