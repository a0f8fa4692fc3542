"""Whole patched models on the Triton kernels: gradients no further from the truth than the stock model's."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch

import memopt
from memopt.kernels import activation_triton, gated_triton, norm_triton
from memopt.verify.gradient import compare_gradients
from memopt.verify.models import cast_inputs, precise
from tests.factories import NAMES, tiny_inputs, tiny_model
from tests.triton.conftest import DEVICE


@pytest.fixture
def launches(monkeypatch) -> Counter[str]:
    """How often each launcher was called."""
    counts: Counter[str] = Counter()
    for module in (activation_triton, gated_triton, norm_triton):
        for name in [name for name in vars(module) if name.startswith("launch_") and name != "launch_config"]:
            label = f"{module.__name__.rpartition('.')[2].removesuffix('_triton')}.{name.removeprefix('launch_')}"
            monkeypatch.setattr(module, name, counted(getattr(module, name), counts, label))
    return counts


def counted(launch, counts, label):
    def launch_and_count(*args, **kwargs):
        counts[label] += 1
        return launch(*args, **kwargs)

    return launch_and_count


def loss_and_gradients(model, inputs):
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def on_device(inputs, dtype):
    return {key: value.to(DEVICE) for key, value in cast_inputs(inputs, dtype).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_no_further_from_the_truth_than_the_stock_models(name, dtype, launches):
    model, inputs = tiny_model(name, dtype).to(DEVICE), on_device(tiny_inputs(name, 2, 16), dtype)
    with precise(torch.float64):
        _, truth = loss_and_gradients(copy.deepcopy(model).double(), cast_inputs(inputs, torch.float64))
    stock_loss, stock = loss_and_gradients(model, inputs)
    patched_loss, patched = loss_and_gradients(memopt.patch(model), inputs)
    checks = list(compare_gradients(patched, stock, truth, dtype, "fp64", stock_loss, patched_loss))
    assert all(check.status == "pass" for check in checks), checks
    assert launches["norm.forward"] > 0
    assert launches["norm.backward"] == launches["norm.forward"]


@pytest.mark.parametrize("name", ["llama", "phi3", "t5", "gemma2"])
def test_a_gated_mlp_takes_one_kernel_forward_and_one_backward(name, launches):
    model, inputs = memopt.patch(tiny_model(name).to(DEVICE)), on_device(tiny_inputs(name, 2, 8), torch.float32)
    loss_and_gradients(model, inputs)
    mlps = model.config.num_hidden_layers * (2 if name == "t5" else 1)
    assert (launches["gated.forward"], launches["gated.backward"]) == (mlps, mlps)


@pytest.mark.parametrize("name", ["vit", "bert", "gpt2"])
def test_an_activation_and_its_linear_take_one_kernel_forward_and_one_backward(name, launches):
    model, inputs = memopt.patch(tiny_model(name).to(DEVICE)), on_device(tiny_inputs(name, 2, 8), torch.float32)
    loss_and_gradients(model, inputs)
    layers = model.config.num_hidden_layers
    assert (launches["activation.forward"], launches["activation.backward"]) == (layers, layers)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_under_autocast_too(name, launches):
    model, inputs = tiny_model(name).to(DEVICE), on_device(tiny_inputs(name, 2, 8), torch.float32)
    with precise(torch.float64):
        _, truth = loss_and_gradients(copy.deepcopy(model).double(), cast_inputs(inputs, torch.float64))
    with torch.autocast(DEVICE, torch.bfloat16):
        stock_loss, stock = loss_and_gradients(model, inputs)
        patched_loss, patched = loss_and_gradients(memopt.patch(model), inputs)
    checks = list(compare_gradients(patched, stock, truth, torch.bfloat16, "fp64", stock_loss, patched_loss))
    assert all(check.status == "pass" for check in checks), checks
    assert launches["norm.forward"] > 0
