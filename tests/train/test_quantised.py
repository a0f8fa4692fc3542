"""LoRA on quantised linears: a patched model has the stock model's gradients, and saves as little as on plain ones.

GPTQ and AWQ have no package that installs here; their linears have codes and sizes as these have.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    QuantoConfig,
    TorchAoConfig,
)

import memopt
from memopt.errors import ModelError
from memopt.pipeline import patch_checkpoint
from memopt.trace.account import account
from tests.factories import tiny_inputs, tiny_model
from tests.patches.test_adapters import Gradients, error, gradients
from tests.support.compare import step_gradients

#: Each operation rounds once to fp32: about 64 on a path forward and back through two blocks, off by half of its
#: epsilon of the largest element.
_ROUNDINGS = 64 * torch.finfo(torch.float32).eps
#: docs/verify.md
_RATIO = 1.25
#: Rows and columns in which every library can quantise; the blocks' gate and up outputs.
_WIDTH = {"hidden_size": 128, "intermediate_size": 384}
_ROWS = 2 * 48
_GATE_AND_UP = 2 * 2 * _ROWS * _WIDTH["intermediate_size"] * 4
_LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

Load = Callable[[Path, torch.dtype], nn.Module]


def _by_config(config: Callable[[torch.dtype], Any]) -> Load:
    return lambda folder, dtype: AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, quantization_config=config(dtype), device_map="cpu"
    )


def _torchao(dtype: torch.dtype) -> TorchAoConfig:
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def _hqq(folder: Path, dtype: torch.dtype) -> nn.Module:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    for layer in model.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    config = BaseQuantizeConfig(nbits=4, group_size=64)
                    setattr(parent, name, HQQLinear(child, config, compute_dtype=dtype, device="cpu"))
    return model


KINDS: dict[str, Load] = {
    "bitsandbytes nf4": _by_config(
        lambda dtype: BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    ),
    "bitsandbytes int8": _by_config(lambda dtype: BitsAndBytesConfig(load_in_8bit=True)),
    "torchao int8": _by_config(_torchao),
    "quanto int8": _by_config(lambda dtype: QuantoConfig(weights="int8")),
    "hqq 4 bits": _hqq,
}
#: On the CPU its linear holds its input in an attribute, where no saved-tensor hook sees it (MatMul8bitFp).
HOLDS_ITS_INPUT = "bitsandbytes int8"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("quantised") / "llama"
    tiny_model("llama", torch.bfloat16, **_WIDTH).save_pretrained(out)
    return out


def adapted(model: nn.Module) -> PeftModel:
    """`model` with LoRA on every linear and trainable norms; all of their values are bf16 numbers."""
    torch.manual_seed(0)
    peft_model = get_peft_model(model, LoraConfig(r=4, target_modules=_LINEARS), autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_" in name:
                values = parameter.float() + 0.05 * torch.randn(parameter.shape, generator=generator)
                parameter.copy_(values.bfloat16())
            parameter.requires_grad_("lora_" in name or "norm" in name)
    return peft_model.train()


def assert_same(ours: Gradients, stock: Gradients) -> None:
    assert ours.keys() == stock.keys()
    for name, expected in stock.items():
        assert (ours[name] - expected).abs().max() <= _ROUNDINGS * expected.abs().max(), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.rotates(3)
def test_gradients_and_saved_bytes(folder: Path, kind: str) -> None:
    inputs = tiny_inputs("llama", 2, _ROWS // 2)
    stock = adapted(KINDS[kind](folder, torch.float32))
    truth = gradients(stock, inputs)

    def bytes_of(model: nn.Module) -> int:
        return account(model, lambda: model(**inputs).loss).total

    before = bytes_of(stock)
    sites = memopt.plan_for(stock).sites
    assert (sites.ran, sites.notes, len(sites.gated_mlps)) == (True, (), 2)
    patched = memopt.patch(stock)  # the same object
    assert_same(gradients(patched, inputs), truth)
    after = bytes_of(patched)
    memopt.patch(memopt.unpatch(patched), memopt.load_recipe("exact-unfolded", ["linears.recompute=mlp"]))
    assert_same(gradients(patched, inputs), truth)
    fewer = bytes_of(patched)
    if kind == HOLDS_ITS_INPUT:
        assert fewer <= after < before
    else:
        assert after < before - _GATE_AND_UP / 2  # act(gate) and the product of two blocks, each as large as gate
        assert fewer < after - 0.9 * _GATE_AND_UP


@pytest.mark.parametrize("kind", KINDS)
def test_in_bf16_the_error_is_the_stock_models(folder: Path, kind: str) -> None:
    """Patched before there are adapters, as a trainer's `peft_config` adds them."""
    inputs = tiny_inputs("llama", 2, _ROWS // 2)
    truth = gradients(adapted(KINDS[kind](folder, torch.float32)), inputs)
    stock = gradients(adapted(KINDS[kind](folder, torch.bfloat16)), inputs)
    ours = gradients(adapted(memopt.patch(KINDS[kind](folder, torch.bfloat16))), inputs)
    assert error(ours, truth) <= _RATIO * error(stock, truth)


@pytest.mark.parametrize("checkpointing", [True, False])
def test_before_and_after_the_model_is_prepared_for_training_on_codes(folder: Path, checkpointing: bool) -> None:
    """`prepare_model_for_kbit_training` freezes, casts norms and head to fp32, and switches checkpointing on."""
    inputs = tiny_inputs("llama", 2, _ROWS // 2)

    def prepared(model: nn.Module) -> nn.Module:
        ready: nn.Module = prepare_model_for_kbit_training(model, use_gradient_checkpointing=checkpointing)
        assert {each.dtype for each in ready.parameters() if each.is_floating_point()} == {torch.float32}
        return ready

    def model() -> nn.Module:
        return KINDS["bitsandbytes nf4"](folder, torch.bfloat16)

    def found(made: nn.Module) -> Gradients:
        with torch.autocast("cpu", torch.bfloat16):
            return gradients(made, inputs)

    truth = gradients(adapted(prepared(KINDS["bitsandbytes nf4"](folder, torch.float32))), inputs)
    stock = found(adapted(prepared(model())))
    ours = [
        found(memopt.patch(adapted(prepared(model())))),
        found(adapted(memopt.patch(prepared(model())))),
        found(adapted(prepared(memopt.patch(model())))),
    ]
    assert error(ours[0], truth) <= _RATIO * error(stock, truth)
    for other in ours[1:]:
        assert other.keys() == ours[0].keys()
        assert all(torch.equal(other[name], each) for name, each in ours[0].items())


def test_codes_are_not_sampled_and_that_is_said(tmp_path: Path) -> None:
    tiny_model("bert", hidden_size=128, intermediate_size=256).save_pretrained(tmp_path / "bert")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=["classifier"])
    model = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "bert", quantization_config=config, device_map="cpu", num_labels=3
    )
    model = get_peft_model(model, LoraConfig(r=16, target_modules=["query", "value", "output.dense"]))
    with pytest.warns(
        UserWarning, match=r"did not change .*layer\.0\.output\.dense\.base_layer, .*: it is not a linear of its own"
    ):
        memopt.patch(model, "sampled")
    assert "base_layer: it is not a linear of its own weight" in str(memopt.summary(model))


def test_a_quantised_checkpoint_is_refused_by_its_method(folder: Path, tmp_path: Path) -> None:
    KINDS["bitsandbytes nf4"](folder, torch.float32).save_pretrained(tmp_path / "nf4")
    with pytest.raises(ModelError, match="bitsandbytes"):
        patch_checkpoint(tmp_path / "nf4", tmp_path / "out")


def test_a_patched_folder_is_quantised_as_it_is_loaded(folder: Path, tmp_path: Path) -> None:
    patch_checkpoint(folder, tmp_path / "patched")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    options = {"quantization_config": config, "device_map": "cpu", "dtype": torch.float32}
    inputs = tiny_inputs("llama", 2, _ROWS // 2)
    stock = adapted(AutoModelForCausalLM.from_pretrained(tmp_path / "patched", **copy.deepcopy(options)))
    ours = adapted(memopt.load(tmp_path / "patched", **options))
    expected = gradients(stock, inputs)
    found = gradients(ours, inputs)
    frozen = expected.keys() - found.keys()  # folded norms
    assert frozen
    assert all("layernorm" in name for name in frozen)
    assert_same(found, {name: expected[name] for name in found})


@pytest.mark.parametrize("activations", [False, True])
def test_quantisation_aware_training_saves_as_much_as_training_and_one_copy_of_each_weight_more(
    activations: bool,
) -> None:
    from torchao.quantization import quantize_
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    of_inputs = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False) if activations else None
    of_weights = IntxFakeQuantizeConfig(torch.int4, group_size=16)
    plain = tiny_model("llama", **_WIDTH).train()
    stock = copy.deepcopy(plain)
    quantize_(stock, QATConfig(activation_config=of_inputs, weight_config=of_weights, step="prepare"))
    patched = memopt.patch(copy.deepcopy(stock))
    one, other = (step_gradients(model, tiny_inputs("llama", 2, 48)) for model in (stock, patched))
    assert error(other, one) <= _ROUNDINGS
    weights = sum(each.weight.nbytes for each in patched.modules() if isinstance(each, nn.Linear))
    saved = _saved(stock) - _saved(patched)
    if activations:  # the quantised inputs are no recomputed ones
        assert saved >= weights
    else:
        assert saved >= weights + _saved(plain) - _saved(memopt.patch(plain))


def test_training_in_float8_saves_as_much_as_training_in_16_bits() -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    plain = tiny_model("llama", **_WIDTH).train()
    stock = copy.deepcopy(plain)
    convert_to_float8_training(
        stock, config=Float8LinearConfig(emulate=True), module_filter_fn=lambda module, name: "layers" in name
    )
    patched = memopt.patch(copy.deepcopy(stock))
    one, other = (step_gradients(model, tiny_inputs("llama", 2, 48)) for model in (stock, patched))
    assert error(other, one) <= _ROUNDINGS
    assert _saved(stock) - _saved(patched) == _saved(plain) - _saved(memopt.patch(plain))


def _saved(model: nn.Module) -> int:
    return account(model, lambda: model(**tiny_inputs("llama", 2, 48)).loss).total
