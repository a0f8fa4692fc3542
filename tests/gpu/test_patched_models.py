"""Patched models on a real device: the same gradients, and less memory as the allocator counts it."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import transformers

import memopt
from memopt.verification.gradient import compare_gradients
from memopt.walk.aten.precision import precise
from memopt.walk.calls.batch import placed
from tests.factories import NAMES, tiny_inputs, tiny_model
from tests.gpu.sizes import size
from tests.support.compare import loss_and_gradients

pytestmark = [
    pytest.mark.gpu,
]

DEVICE = "cuda"
TOKENS = size(32, interpreted=8)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def case(name, dtype):
    # Gemma 2's scores: a device has a kernel for this, a CPU none.
    why = "softmax of fp16 scores in fp32"
    marks = [pytest.mark.real_device(why)] if (name, dtype) == ("gemma2", torch.float16) else []
    return pytest.param(name, dtype, id=f"{name}-{dtype}", marks=marks)


@pytest.fixture(autouse=True)
def _plain_fp32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize(("name", "dtype"), [case(name, dtype) for name in NAMES for dtype in DTYPES])
@pytest.mark.rotates(3)
def test_gradients_are_no_further_from_the_truth_than_the_stock_models(name, dtype):
    model = tiny_model(name, dtype).to(DEVICE)
    inputs = placed(tiny_inputs(name, 2, TOKENS), DEVICE, dtype)
    with precise(torch.float64):
        _, truth = loss_and_gradients(copy.deepcopy(model).double(), placed(inputs, DEVICE, torch.float64))
    stock_loss, stock = loss_and_gradients(model, inputs)
    patched_loss, patched = loss_and_gradients(memopt.patch(model), inputs)
    checks = list(compare_gradients([patched], [stock], truth, dtype, "fp64", stock_loss, patched_loss))
    assert all(check.status == "pass" for check in checks), checks


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.rotates(3)
def test_autocast_gradients_are_no_worse(name):
    inputs = placed(tiny_inputs(name, 2, TOKENS), DEVICE, torch.float32)
    model = tiny_model(name).to(DEVICE)
    with precise(torch.float64):
        _, truth = loss_and_gradients(copy.deepcopy(model).double(), placed(inputs, DEVICE, torch.float64))
    with torch.autocast(DEVICE, torch.bfloat16):
        stock_loss, stock = loss_and_gradients(model, inputs)
        patched_loss, patched = loss_and_gradients(memopt.patch(model), inputs)
    checks = list(compare_gradients([patched], [stock], truth, torch.bfloat16, "fp64", stock_loss, patched_loss))
    assert all(check.status == "pass" for check in checks), checks


@pytest.mark.real_device("the device's attention kernel, which saves no probabilities")
@pytest.mark.parametrize(("autocast", "most"), [(False, 11.6), (True, 11.6)])
def test_the_allocator_sees_the_saving_on_a_llama_block(autocast, most):
    """Bytes allocated after forward: three blocks less two, in units of tokens x hidden x 2 bytes."""
    hidden, tokens = 1024, 4 * 1024

    def allocated(layers, patched):
        config = transformers.LlamaConfig(
            hidden_size=hidden,
            intermediate_size=2752,
            num_attention_heads=8,
            num_key_value_heads=8,
            num_hidden_layers=layers,
            vocab_size=1000,
            use_cache=False,
        )
        model = transformers.LlamaForCausalLM(config).to(DEVICE, torch.float32 if autocast else torch.bfloat16).train()
        if patched:
            memopt.patch(model)
        ids = torch.randint(3, 1000, (4, 1024), device=DEVICE)
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=ids).loss
        kept = torch.cuda.memory_allocated() - before
        assert loss.requires_grad
        weights = sum(p.numel() for p in model.model.layers.parameters() if p.dim() == 2) * 2 * autocast
        return kept - weights

    def units(patched):
        return (allocated(3, patched) - allocated(2, patched)) / (tokens * hidden * 2)

    assert units(patched=True) <= most
    assert units(patched=False) >= 22
