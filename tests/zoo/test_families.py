"""The families of docs/coverage.md, tiny: patched in four ways, they have the gradients of stock."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

import memopt
from benchmarks.families import FAMILIES, Family
from memopt.patches.checkpointing import heads
from memopt.patches.tile import module as tiles
from memopt.walk.calls.inputs import Call
from memopt.walk.calls.parts import every_call
from memopt.walk.calls.twin import build_twin
from tests.zoo.examine import SMALL, TOLERANCE, _run, difference

QUICK = {"Qwen3", "Qwen3.5", "BERT"}
_CASES = [
    pytest.param(family, id=family.name, marks=() if family.name in QUICK else pytest.mark.slow) for family in FAMILIES
]


@pytest.mark.parametrize("family", _CASES)
@pytest.mark.rotates(3)
def test_gradients_are_those_of_the_stock_model(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "_STEP", 3)  # tokens of a tile, of few in a batch
    monkeypatch.setattr(tiles, "_COPIES", 1 << 30)
    monkeypatch.setattr(heads, "_COPIES", 1 << 30)  # one head of keys in a group
    twin = build_twin(family.config(family.depths[0]))
    call = every_call(twin)[0]
    stock = _gradients(twin, call)
    for recipe in ("exact-unfolded", "exact-levels", "long-context"):
        memopt.patch(twin, recipe)
        assert _difference(stock, _gradients(twin, call)) <= TOLERANCE, recipe
        memopt.unpatch(twin)
    _add_adapters(twin)
    stock = _gradients(twin, call)
    memopt.patch(twin)
    assert _difference(stock, _gradients(twin, call)) <= TOLERANCE, "LoRA"


def _gradients(model: nn.Module, call: Call) -> list[dict[str, Tensor]]:
    """In eval and in train mode, each relative to a random combination of all outputs."""
    results = [_run(model, call, training) for training in (False, True)]
    assert not any(result.error for result in results)
    assert all(result.gradients for result in results)
    return [result.gradients for result in results]


def _difference(stock: list[dict[str, Tensor]], patched: list[dict[str, Tensor]]) -> float:
    return max(difference(one, other, SMALL) for one, other in zip(stock, patched, strict=True))


def _add_adapters(model: PreTrainedModel) -> None:
    """Adapters, none of them zero, on every linear of a block; nothing else is trained."""
    blocks = memopt.plan_for(model).sites.blocks
    linears = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and any(name.startswith(f"{block}.") for block in blocks)
    ]
    if model.config.model_type in ("falcon_h1", "mamba2", "nemotron_h"):  # PEFT refuses it: a kernel reads its weight
        linears = [name for name in linears if not name.endswith(".out_proj")]
    get_peft_model(model, LoraConfig(r=4, target_modules=linears))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 10
