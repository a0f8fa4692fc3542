"""QLoRA as it is predicted, from a config and without bitsandbytes, is what bitsandbytes and PEFT do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import benchmarks.prediction as benchmark
import memopt
from memopt.prediction.peak import predict
from memopt.prediction.subject import step_of
from memopt.trace.account import account
from memopt.trace.trace import trace_account
from memopt.trace.training import Precision, Request
from tests.factories import tiny_inputs, tiny_model
from tests.train.test_quantised import _WIDTH

BATCH, SEQ = 2, 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("qlora") / "llama"
    tiny_model("llama", torch.bfloat16, **_WIDTH).save_pretrained(out)
    return out


def loaded(folder: Path, *, nested: bool = False, prepared: bool = False) -> Any:
    """As a user loads it, with adapters on every linear."""
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=nf4, device_map="cpu"
    )
    prepare: Any = prepare_model_for_kbit_training
    model = prepare(model, use_gradient_checkpointing=False) if prepared else model
    return get_peft_model(model, LoraConfig(r=8, target_modules="all-linear")).train()


def held(model: torch.nn.Module) -> int:
    """Bytes of every tensor that a model holds in parameters, buffers and what hangs on them."""

    def tensors(value: Any) -> Iterator[Tensor]:
        if isinstance(value, Tensor):
            yield value
            yield from tensors(getattr(value, "quant_state", None))
        elif type(value).__name__ == "QuantState":
            for inner in vars(value).values():
                yield from tensors(inner)

    found = {}
    for tensor in (*model.parameters(), *model.buffers()):
        for each in tensors(tensor):
            found[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return sum(found.values())


@pytest.mark.parametrize(
    ("nested", "precision"),
    [(False, "bf16"), (True, "bf16"), (False, "bf16-mixed")],
    ids=["bf16", "double quantisation", "prepared, autocast"],
)
def test_a_folder_in_4_bits_has_the_bytes_that_its_model_holds_and_saves(
    folder: Path, tmp_path: Path, nested: bool, precision: Precision
) -> None:
    """Stock and patched, by the settings in its config.json."""
    mixed = precision == "bf16-mixed"
    model = loaded(folder, nested=nested, prepared=mixed)
    base = model.get_base_model()
    base.config.save_pretrained(tmp_path)
    request = Request(tmp_path, batch=BATCH, seq=SEQ, precision=precision, train="lora")
    of = step_of(request).trained(cuda_kernels=False)
    assert of.training.train == "qlora"
    assert sum(each.nbytes for each in predict(of.stock).trace.parameters) == held(model)
    inputs = tiny_inputs("llama", BATCH, SEQ)
    base.config.use_cache = False

    def run() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            loss: Tensor = model(**inputs).loss
            return loss

    def per_block() -> dict[str, int]:
        return account(base, run, blocks=of.sites.blocks, sites=of.sites).per_block()

    assert trace_account(of.stock).per_block() == per_block()
    memopt.patch(model)
    assert trace_account(of).per_block() == per_block()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-mixed"])
@pytest.mark.parametrize("way", ["none", "exact"])
def test_the_peak_of_a_step_is_the_predicted_one(way: str, precision: Precision) -> None:
    row = benchmark.measure(benchmark.Pair("llama", "qlora", way, precision, depth=1))
    assert row.predicted == pytest.approx(row.live, rel=benchmark.LIMIT)


def test_of_4_bits_nothing_before_the_first_adapter_is_saved() -> None:
    """PEFT would have the embeddings' output ask for a gradient otherwise."""
    row = benchmark.measure(benchmark.Pair("bert", "qlora", "levels", depth=2))
    assert row.predicted == row.live
