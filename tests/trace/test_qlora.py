"""A report for QLoRA: weights in 4 bits, adapters in fp32; what it says of a checkpoint that is quantised already."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import transformers

from memopt.cli.main import main
from memopt.errors import ModelError
from memopt.plan.recipe import load_recipe
from memopt.prediction.subject import step_of
from memopt.torch_compat import FakeTensorMode
from memopt.trace.estimate import build_trained
from memopt.trace.fake import make_fake
from memopt.trace.trace import parameters_of, trace_account
from memopt.trace.training import Request, Step, Train, Training
from memopt.walk.sites import Sites
from tests.trace.builders import named_config, sites_of
from tests.trace.test_estimate import BLOCKS_8B, LLAMA_8B

NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def quantised_folder(folder: Path, **settings: Any) -> Path:
    named_config("llama").save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": settings}))
    return folder


def weights(config: transformers.PreTrainedConfig, sites: Sites, **training: Any) -> dict[str, int]:
    """Bytes of the tensors that are not trained."""
    model = build_trained(Step(config, Training(**training), sites)).trained
    make_fake(model, FakeTensorMode())
    return {each.name: each.nbytes for each in parameters_of(model) if not each.trained}


@pytest.mark.parametrize(("double", "bits"), [(False, 4 + 32 / 64), (True, 4 + 8 / 64 + 32 / 64 / 256)])
def test_an_8b_model_in_4_bits(double: bool, bits: float) -> None:
    """All its linears but the head. The QLoRA paper says 0.5 bits an element for scales, 0.127 double quantised."""
    quantised = {"quantization_config": {**NF4, "bnb_4bit_use_double_quant": double}} if double else {}
    config = transformers.LlamaConfig(**LLAMA_8B, **quantised)
    found = weights(config, BLOCKS_8B, train="qlora")
    rest = 2 * 2 * 128256 * 4096 + 2 * (2 * 32 + 1) * 4096
    linears = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    codes = 32 * 7 * 4 * (16 + (256 + 1) * double)
    rotary = sum(size for name, size in found.items() if "rotary" in name)
    assert sum(found.values()) == rest + linears * bits / 8 + codes + rotary


def test_adapters_are_in_fp32_and_a_linear_saves_nothing_of_its_own() -> None:
    config, sites = named_config("llama"), sites_of(named_config("llama"))
    settings: dict[str, Any] = {"batch": 2, "seq": 24, "adapter_fp32": True}
    lora, qlora = (trace_account(Step(config, Training(train=train, **settings), sites)) for train in ("lora", "qlora"))
    assert lora.per_block() == qlora.per_block()
    assert trace_account(Step(config, Training(train="qlora", batch=2, seq=24), sites)).per_block() == qlora.per_block()


def test_a_checkpoint_in_4_bits_is_recognised_by_its_config(tmp_path: Path) -> None:
    folder = quantised_folder(
        tmp_path, **NF4, bnb_4bit_use_double_quant=True, llm_int8_skip_modules=["down_proj", "lm_head"]
    )
    of = step_of(Request(folder, train="lora"))
    assert of.training.train == "qlora"
    found = weights(of.config, of.sites, train="qlora")
    packed = {name.split(".")[-2] for name in found if name.endswith("nested_absmax")}
    assert packed == {"base_layer"}
    assert not any("down_proj" in name for name in found if name.endswith("absmax"))
    with pytest.raises(ModelError, match="4 bits, which cannot be trained"):
        step_of(Request(folder))


@pytest.mark.parametrize(
    ("train", "counted"),
    [
        ("lora", "its weights are counted as not quantised"),
        ("qlora", "its linears are counted in bitsandbytes' 4 bits"),
    ],
)
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_another_quantisation_is_said_not_to_be_counted(
    tmp_path: Path, method: str, train: Train, counted: str
) -> None:
    folder = quantised_folder(tmp_path, quant_method=method, bits=4)
    said = f"The checkpoint is quantised ({method}), which memopt does not count: {counted}."
    assert step_of(Request(folder, train=train)).notes == (said,)


@pytest.mark.parametrize(
    ("train", "checkpointing", "recipe", "asked"),
    [
        ("lora", "full", "exact-unfolded", True),
        ("lora", "none", "exact-levels", False),  # its blocks do not show the model's own switch
        ("qlora", "none", "exact-levels", False),
    ],
)
def test_peft_turns_on_gradients_of_the_embeddings_under_the_models_own_checkpointing(
    train: Train, checkpointing: Literal["none", "full"], recipe: str, asked: bool
) -> None:
    config = named_config("bert")
    training = Training(train=train, checkpointing=checkpointing)
    model = build_trained(Step(config, training, sites_of(config), load_recipe(recipe))).model
    assert bool(model.get_input_embeddings()._forward_hooks) is asked


def test_the_command_says_how_the_weights_are_held(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named_config("llama").save_pretrained(tmp_path)
    assert main(["report", str(tmp_path), "--train", "qlora", "--seq", "32"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "QLoRA rank 8 on all-linear" in out
    assert "4-bit weights: bitsandbytes' in all linears but the head" in out
