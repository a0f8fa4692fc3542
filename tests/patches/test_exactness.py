"""A patched model computes the stock model's loss and gradients, and keeps fewer bytes, for every family."""

from __future__ import annotations

import copy

import pytest
import torch

import memopt
from memopt.patches.apply import is_patched
from memopt.trace.account import account
from memopt.verification.gradient import compare_gradients
from memopt.verification.models import cast_inputs
from memopt.walk.aten.precision import precise
from tests.factories import NAMES, tiny_inputs, tiny_model
from tests.support.compare import loss_and_gradients

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.rotates(3)
def test_gradients_are_no_further_from_the_truth_than_the_stock_models(name, dtype):
    model = tiny_model(name, dtype)
    inputs = cast_inputs(tiny_inputs(name, 2, 24), dtype)
    with precise(torch.float64):
        _, truth = loss_and_gradients(copy.deepcopy(model).double(), cast_inputs(inputs, torch.float64))
    stock_loss, stock = loss_and_gradients(model, inputs)
    patched_loss, patched = loss_and_gradients(memopt.patch(model), inputs)
    assert patched.keys() == stock.keys()
    checks = list(compare_gradients([patched], [stock], truth, dtype, "fp64", stock_loss, patched_loss))
    assert [check.status for check in checks] == ["pass", "pass"], checks
    assert patched_loss.item() == pytest.approx(stock_loss.item(), rel=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("name", NAMES)
def test_fewer_bytes_are_kept_and_none_outside_the_graph(name):
    from memopt.trace.account import live_bytes

    model = tiny_model(name, torch.bfloat16)
    inputs = cast_inputs(tiny_inputs(name, 2, 24), torch.bfloat16)
    totals = []
    for candidate in (model, memopt.patch(copy.deepcopy(model))):
        saved = account(candidate, lambda candidate=candidate: candidate(**inputs).loss).saved
        assert saved == live_bytes(lambda candidate=candidate: candidate(**inputs).loss)
        totals.append(saved)
    assert totals[1] < 0.85 * totals[0]


@pytest.mark.parametrize("name", NAMES)
def test_state_dict_keys_order_and_values_do_not_change(name):
    model = tiny_model(name)
    before = copy.deepcopy(model.state_dict())
    after = memopt.patch(model).state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("name", NAMES)
def test_unpatch_restores_the_stock_model(name):
    model = tiny_model(name)
    inputs = tiny_inputs(name, 2, 24)
    classes = [type(module) for module in model.modules()]
    loss, gradients = loss_and_gradients(model, inputs)
    memopt.unpatch(memopt.patch(model))
    assert [type(module) for module in model.modules()] == classes
    assert not is_patched(model)
    again, restored = loss_and_gradients(model, inputs)
    assert again == loss
    assert all(torch.equal(gradients[key], restored[key]) for key in gradients)


@pytest.mark.parametrize("name", NAMES)
def test_every_norm_activation_and_linear_is_in_the_coverage_table(name):
    model = tiny_model(name)
    plan = memopt.plan_for(model)
    covered = {entry.site for entry in plan.entries}
    norms = {n for n, m in model.named_modules() if "norm" in type(m).__name__.lower()}
    assert norms <= covered
    weights = {
        n
        for n, p in model.named_parameters()
        if p.dim() == 2 and "embed" not in n and n.split(".")[-2] not in EMBEDDINGS
    }
    assert weights <= covered
    assert any(entry.kind == "activation" for entry in plan.entries)
    assert all(entry.reason for entry in plan.entries)


#: Matrices that are looked up, not multiplied.
EMBEDDINGS = {"wte", "wpe", "shared", "relative_attention_bias"}
