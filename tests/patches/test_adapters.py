"""Adapters of every kind train the same on a patched model: the same gradients, and no more saved bytes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.optimizers import create_lorafa_optimizer
from torch import nn

import memopt
from memopt.trace.account import account
from tests.factories import tiny_inputs, tiny_model

Gradients = dict[str, torch.Tensor]

#: The weights are fp64, so what both runs round are the casts to fp32 in the stock classes: of each norm's input and of
#: the logits, forward and backward, at most 16 on a path, each by half of fp32's epsilon of the largest element.
_ROUNDINGS = 16 * torch.finfo(torch.float32).eps
#: Of the model's largest gradient: where one is zero but for the rounding of fp64 (biases of keys).
_ZERO = 64 * torch.finfo(torch.float64).eps
#: docs/verify.md: by how much a patched model's error against an fp64 run may exceed the stock model's.
_RATIO = 1.25

_LINEARS: dict[str, Any] = {"llama": "all-linear", "bert": "all-linear", "gpt2": ["c_attn", "c_proj", "c_fc"]}
_SOME = {
    "llama": ["q_proj", "v_proj", "down_proj"],
    "bert": ["query", "value", "output.dense"],
    "gpt2": ["c_attn", "mlp.c_proj"],
}
_LAST = {"llama": ["down_proj"], "bert": ["output.dense"], "gpt2": ["mlp.c_proj"]}
_ATTENTION = {"llama": ["q_proj", "v_proj"], "bert": ["query", "value"], "gpt2": ["c_attn"]}
_HEAD = {"llama": "lm_head", "bert": "classifier", "gpt2": "lm_head"}
_NORMS = {"llama": ["input_layernorm"], "bert": ["LayerNorm"], "gpt2": ["ln_1"]}


def lora(family: str, **settings: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "target_modules": _LINEARS[family], "fan_in_fan_out": family == "gpt2", **settings})


def _named(kind: str, **settings: Any) -> Callable[[str], peft.PeftConfig]:
    """A config of PEFT's class `kind` on every linear, unless `settings` name modules by family."""

    def config(family: str) -> peft.PeftConfig:
        values = {key: value[family] if isinstance(value, dict) else value for key, value in settings.items()}
        return getattr(peft, kind)(**{"target_modules": _LINEARS[family], **values})

    return config


_TRANSPOSED = {"llama": False, "bert": False, "gpt2": True}
ADAPTERS: dict[str, Callable[[str], peft.PeftConfig]] = {
    "lora": lora,
    "rslora": lambda family: lora(family, use_rslora=True),
    "dropout": lambda family: lora(family, lora_dropout=0.1),
    "dora": lambda family: lora(family, use_dora=True),
    "dora with dropout": lambda family: lora(family, use_dora=True, lora_dropout=0.1),
    "every bias": lambda family: lora(family, bias="all"),
    "a bias of LoRA": lambda family: lora(family, lora_bias=True),
    "modules to save": lambda family: lora(family, target_modules=_SOME[family], modules_to_save=[_HEAD[family]]),
    "ia3": _named("IA3Config", target_modules=_SOME, feedforward_modules=_LAST, fan_in_fan_out=_TRANSPOSED),
    "vera": _named("VeraConfig", r=8, target_modules=_ATTENTION, fan_in_fan_out=_TRANSPOSED),
    "adalora": _named("AdaLoraConfig", init_r=6, total_step=100, tinit=10, tfinal=10, fan_in_fan_out=_TRANSPOSED),
    "norms": _named("LNTuningConfig", target_modules=_NORMS),
    "loha": _named("LoHaConfig", r=4),
    "lokr": _named("LoKrConfig", r=4),
    "oft": _named("OFTConfig", oft_block_size=4),
}
#: PEFT has no form of these for Conv1D.
_NOT_FOR_CONV1D = {"loha", "lokr", "oft"}
#: The other families show what the Llama does not: biases, Conv1D, post-norm blocks.
CASES = [
    *(("llama", kind) for kind in ADAPTERS),
    *(("gpt2", kind) for kind in ("lora", "dropout", "dora", "every bias", "modules to save", "ia3", "vera", "norms")),
    *(("bert", kind) for kind in ("lora", "dropout", "dora", "every bias", "ia3", "loha", "oft", "norms")),
]


def adapted(family: str, *configs: peft.PeftConfig, dtype: torch.dtype = torch.float64) -> PeftModel:
    """A tiny model with an adapter for each of `configs`, none of which is at its initial value.

    All values are bf16 numbers, so that a model in bf16 has the same.
    """
    model = get_peft_model(tiny_model(family), configs[0], "first", autocast_adapter_dtype=False)
    for index, config in enumerate(configs[1:]):
        model.add_adapter(f"next{index}", config, autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "first" in name or "next" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model.bfloat16().to(dtype).train()


def loss_of(model: nn.Module, inputs: dict[str, torch.Tensor], **arguments: Any) -> torch.Tensor:
    torch.manual_seed(5)  # the same masks of dropout
    loss: torch.Tensor = model(**inputs, **arguments).loss
    return loss


def gradients(model: nn.Module, inputs: dict[str, torch.Tensor], **arguments: Any) -> Gradients:
    model.zero_grad()
    loss_of(model, inputs, **arguments).backward()
    return {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(ours: Gradients, stock: Gradients) -> None:
    assert ours.keys() == stock.keys()
    for name, expected in stock.items():
        limit = _ROUNDINGS * expected.abs().max() + _ZERO * largest(stock)
        assert (ours[name] - expected).abs().max() <= limit, name


def largest(found: Gradients) -> float:
    return max(each.abs().max().item() for each in found.values())


def error(found: Gradients, truth: Gradients) -> float:
    """Root mean square over the parameters of each gradient's relative error, where it is not zero."""
    there = [name for name in truth if truth[name].abs().max() > _ZERO * largest(truth)]
    errors = [((found[name] - truth[name]).norm() / truth[name].norm()).item() for name in there]
    return math.sqrt(sum(each**2 for each in errors) / len(errors))


def saved_bytes(model: nn.Module, inputs: dict[str, torch.Tensor]) -> int:
    return account(model, lambda: loss_of(model, inputs)).total


@pytest.mark.parametrize(("family", "kind"), CASES)
@pytest.mark.rotates(3)
def test_gradients_are_the_stock_models_and_no_more_bytes_are_saved(family: str, kind: str) -> None:
    inputs = tiny_inputs(family, 2, 24)
    stock = adapted(family, ADAPTERS[kind](family))
    patched = memopt.patch(copy.deepcopy(stock))
    truth = gradients(stock, inputs)
    assert_same(gradients(patched, inputs), truth)
    long = tiny_inputs(family, 2, 72)  # a patched norm saves a copy of its affine and no means: less from 128 rows on
    assert saved_bytes(patched, long) < saved_bytes(stock, long)
    stock, patched = stock.bfloat16(), patched.bfloat16()
    assert error(gradients(patched, inputs), truth) <= _RATIO * error(gradients(stock, inputs), truth)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_adapters_that_are_added_to_a_patched_model_and_switched(family: str) -> None:
    """Patched before there was any adapter; then one is used after the other, and both at once."""
    inputs = tiny_inputs(family, 2, 24)
    configs = [lora(family), lora(family, r=2, target_modules=_SOME[family])]
    stock = adapted(family, *configs)
    patched = get_peft_model(memopt.patch(tiny_model(family)), configs[0], "first", autocast_adapter_dtype=False)
    patched.add_adapter("next0", configs[1], autocast_adapter_dtype=False)
    patched = patched.bfloat16().double().train()
    patched.load_state_dict(stock.state_dict())
    for active in ("next0", "first", ["first", "next0"]):
        for model in (stock, patched):
            model.base_model.set_adapter(active)
        assert_same(gradients(patched, inputs), gradients(stock, inputs))
    with stock.disable_adapter(), patched.disable_adapter():
        assert loss_of(patched, inputs) == pytest.approx(loss_of(stock, inputs).item(), rel=_ROUNDINGS)


def test_rows_of_a_batch_with_adapters_of_their_own() -> None:
    inputs, names = tiny_inputs("llama", 3, 24), ["next0", "first", "__base__"]
    stock = adapted("llama", lora("llama"), lora("llama", r=2))
    patched = memopt.patch(copy.deepcopy(stock))
    for model in (stock, patched):
        model.eval()  # PEFT mixes adapters in one batch in eval mode alone
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
    assert_same(gradients(patched, inputs, adapter_names=names), gradients(stock, inputs, adapter_names=names))


def test_steps_of_lora_fa_which_trains_no_a() -> None:
    inputs = tiny_inputs("llama", 2, 24)
    stock = adapted("llama", lora("llama"))
    patched = memopt.patch(copy.deepcopy(stock))

    def steps(model: PeftModel) -> Iterator[Gradients]:
        optimizer = create_lorafa_optimizer(model, r=4, lora_alpha=8, lr=1e-3)
        for _ in range(2):
            yield gradients(model, inputs)
            optimizer.step()

    for expected, ours in zip(steps(stock), steps(patched), strict=True):
        assert not any("lora_A" in name for name in expected)
        assert_same(ours, expected)
