"""Whole patched models on the Triton kernels: gradients no further from the truth than the stock model's."""

from __future__ import annotations

import copy
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.utils._python_dispatch import TorchDispatchMode

import memopt
from memopt.kernels.activation import function as activation
from memopt.kernels.base import autograd
from memopt.kernels.gated_mlp import function as gated
from memopt.patches.sum_norm import module as sum_norm
from memopt.verification.gradient import compare_gradients
from memopt.walk.aten.precision import precise
from memopt.walk.calls.batch import placed
from tests.factories import NAMES, tiny_inputs, tiny_model
from tests.support.compare import loss_and_gradients, stock_and_patched
from tests.support.launches import count_launches
from tests.triton.conftest import DEVICE


@pytest.fixture
def launches(monkeypatch) -> Counter[str]:
    """How often each launcher was called."""
    return count_launches(monkeypatch)


#: In bf16 too: pre-norm and post-norm blocks, an MLP with and without a gate, Conv1D.
BF16 = ("llama", "bert", "gpt2")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in NAMES),
        *(
            pytest.param(name, torch.bfloat16, marks=[] if name in BF16 else pytest.mark.slow, id=f"{name}-bf16")
            for name in NAMES
        ),
    ],
)
def test_gradients_are_no_further_from_the_truth_than_the_stock_models(name, dtype, launches):
    model, inputs = tiny_model(name, dtype).to(DEVICE), placed(tiny_inputs(name, 2, 8), DEVICE, dtype)
    with precise(torch.float64):
        _, truth = loss_and_gradients(copy.deepcopy(model).double(), placed(inputs, DEVICE, torch.float64))
    stock_loss, stock = loss_and_gradients(model, inputs)
    patched_loss, patched = loss_and_gradients(memopt.patch(model), inputs)
    checks = list(compare_gradients([patched], [stock], truth, dtype, "fp64", stock_loss, patched_loss))
    assert all(check.status == "pass" for check in checks), checks
    assert launches["norm.forward"] > 0
    assert launches["norm.backward"] == launches["norm.forward"]


@pytest.mark.parametrize("name", ["llama", "phi3", "t5", "gemma2"])
def test_a_gated_mlp_takes_one_kernel_forward_and_one_backward(name, launches):
    model, inputs = memopt.patch(tiny_model(name).to(DEVICE)), placed(tiny_inputs(name, 2, 8), DEVICE, torch.float32)
    loss_and_gradients(model, inputs)
    mlps = model.config.num_hidden_layers * (2 if name == "t5" else 1)
    # The first of its size in a backward has a pass of its own for its product, but where both halves are one tensor.
    again = {"phi3": 0, "t5": 2}.get(name, 1)
    assert (launches["gated_mlp.forward"], launches["gated_mlp.backward"]) == (mlps + again, mlps)


@pytest.mark.parametrize("name", ["vit", "bert", "gpt2"])
def test_an_activation_and_its_linear_take_one_kernel_forward_and_one_backward(name, launches):
    model, inputs = memopt.patch(tiny_model(name).to(DEVICE)), placed(tiny_inputs(name, 2, 8), DEVICE, torch.float32)
    loss_and_gradients(model, inputs)
    layers = model.config.num_hidden_layers
    # The first of a backward has a pass of its own for its output.
    assert (launches["activation.forward"], launches["activation.backward"]) == (layers + 1, layers)


class Additions(TorchDispatchMode):
    """Counts additions of two tensors."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        operands = [arg for arg in args if isinstance(arg, torch.Tensor)]
        self.count += func._schema.name in ("aten::add", "aten::add_") and len(operands) == 2
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_a_post_norm_layer_runs_one_kernel_a_norm_and_never_makes_the_sums(name, launches):
    model = memopt.patch(tiny_model(name).to(DEVICE))
    layer, x = getattr(model, name).encoder.layer[0], torch.randn(2, 8, 64, device=DEVICE, requires_grad=True)
    with Additions() as additions:
        y = layer(x)
    y = y if isinstance(y, torch.Tensor) else y[0]
    assert additions.count == 0
    assert launches["norm.forward"] == 2
    (y * torch.randn_like(y)).sum().backward()
    assert launches["norm.backward"] == 2
    with Additions() as additions, torch.no_grad():
        layer(x)
    assert additions.count == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sum_that_is_not_made_changes_no_bit(dtype, launches, monkeypatch):
    model, inputs = memopt.patch(tiny_model("bert", dtype).to(DEVICE)), placed(tiny_inputs("bert", 2, 8), DEVICE, dtype)
    loss, gradients = loss_and_gradients(model, inputs)
    assert launches["norm.forward"] == 1 + 2 * model.config.num_hidden_layers
    monkeypatch.setattr(sum_norm, "runs_triton", lambda *_: False)
    stock_loss, stock = loss_and_gradients(model, inputs)
    assert loss == stock_loss
    assert gradients.keys() == stock.keys()
    assert all(torch.equal(gradients[name], stock[name]) for name in stock)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_under_autocast_too(name, launches):
    model, inputs = tiny_model(name).to(DEVICE), placed(tiny_inputs(name, 2, 8), DEVICE, torch.float32)
    with precise(torch.float64):
        _, truth = loss_and_gradients(copy.deepcopy(model).double(), placed(inputs, DEVICE, torch.float64))
    with torch.autocast(DEVICE, torch.bfloat16):
        stock_loss, stock = loss_and_gradients(model, inputs)
        patched_loss, patched = loss_and_gradients(memopt.patch(model), inputs)
    checks = list(compare_gradients([patched], [stock], truth, torch.bfloat16, "fp64", stock_loss, patched_loss))
    assert all(check.status == "pass" for check in checks), checks
    assert launches["norm.forward"] > 0


@pytest.mark.parametrize("tool", ["parametrize", "prune"])
def test_a_bias_that_a_tool_computes_is_not_lost(tool):
    results = []
    for model in stock_and_patched(lambda: tiny_model("bert").to(DEVICE)):
        for layer in model.bert.encoder.layer:
            dense = layer.output.dense
            if tool == "prune":
                prune.l1_unstructured(dense, "bias", amount=4)
            else:
                parametrize.register_parametrization(dense, "bias", nn.Softplus())
        inputs = placed(tiny_inputs("bert", 2, 8), DEVICE, torch.float32)
        results.append(model(**inputs).loss)
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


def test_a_captured_activation_is_in_the_graph():
    results = []
    for model in stock_and_patched(lambda: tiny_model("bert").to(DEVICE)):
        captured = []
        act = model.bert.encoder.layer[0].intermediate.intermediate_act_fn
        act.register_forward_hook(lambda module, args, output, captured=captured: captured.append(output))
        loss = model(**placed(tiny_inputs("bert", 2, 8), DEVICE, torch.float32)).loss
        results.append(torch.autograd.grad(loss, captured[0])[0])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-7)


def test_batched_gradients_take_the_references():
    results = []
    for model in stock_and_patched(lambda: tiny_model("bert").to(DEVICE)):
        torch.manual_seed(0)
        x = torch.randn(1, 3, model.config.hidden_size).to(DEVICE).requires_grad_()
        y = model.bert.encoder.layer[0](x)
        y = y[0] if isinstance(y, tuple) else y
        directions = torch.eye(y.numel(), device=DEVICE)[:4].view(4, *y.shape)
        results.append(torch.autograd.grad(y, x, directions, is_grads_batched=True)[0])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "read"), [("llama", "mlp.gate_proj"), ("phi3", "mlp.gate_up_proj"), ("bert", "intermediate.dense")]
)
def test_a_checkpointed_block_writes_gradients_over_what_nobody_else_can_read(name, read, monkeypatch):
    model, inputs = (
        memopt.patch(tiny_model(name).to(DEVICE).train()),
        placed(tiny_inputs(name, 2, 8), DEVICE, torch.float32),
    )
    model.config.use_cache = False
    model.gradient_checkpointing_enable({"use_reentrant": False})
    overwritten: list[bool] = []

    def watched(*tensors, real=autograd.may_be_overwritten, allowed=True):
        overwritten.append(real(*tensors) and allowed)
        return overwritten[-1]

    def step(allowed):
        for module in (activation, gated):
            monkeypatch.setattr(module, "may_be_overwritten", partial(watched, allowed=allowed))
        overwritten.clear()
        torch.manual_seed(0)
        return loss_and_gradients(model, inputs)[1]

    expected = step(False)
    ours = step(True)
    assert overwritten == [True] * model.config.num_hidden_layers
    assert all(torch.equal(ours[key], expected[key]) for key in expected)
    # A hook that takes what a linear gave, when the block runs again.
    taken = []
    linear = next(module for key, module in model.named_modules() if key.endswith(read))
    linear.register_forward_hook(lambda module, args, output: taken.append((output, output.detach().clone())))
    held = step(True)
    assert overwritten.count(False) == 1
    assert all(torch.equal(output, value) for output, value in taken)
    assert all(torch.equal(held[key], expected[key]) for key in expected)
