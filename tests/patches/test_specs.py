"""Recompute specs in patched models: which linears read them, when a scope stays closed, and what outlives a block."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.autograd.graph import save_on_cpu

import memopt
from memopt.kernels.linear.function import RecomputedInputFunction
from memopt.patches.scope import ScopeRewrite
from memopt.patches.swap import is_swapped, swap_state
from memopt.plan.recipe import load_recipe
from memopt.recompute.specs import spec_of
from memopt.trace.account import account
from tests.factories import tiny_inputs, tiny_model
from tests.support.compare import step_gradients

#: The last norm's reader is the head's linear, which a chunked loss does not run.
WHOLE_LOGITS = load_recipe("exact-unfolded", ["loss.method=none"])


def scopes_that_open(model: nn.Module, run) -> int:
    """How many scopes of blocks are entered in one call of `run`."""
    opened = 0
    before = ScopeRewrite.around

    def around(self, *args, **kwargs):
        nonlocal opened
        scope = before(self, *args, **kwargs)
        opened += hasattr(scope, "replaced")
        return scope

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScopeRewrite, "around", around)
        run()
    return opened


def in_blocks(model: nn.Module) -> list[str]:
    return [n for n, m in model.named_modules() if is_swapped(m) and isinstance(swap_state(m), ScopeRewrite)]


def test_a_block_whose_outputs_only_linears_read_needs_its_scope_once():
    model, inputs = memopt.patch(tiny_model("llama"), WHOLE_LOGITS).train(), tiny_inputs("llama", 2, 16)
    first, once = step_gradients(model, inputs), []
    step_gradients(model, inputs)
    # The head's scope, around the linear behind the last norm, stays: it has replaced its input.
    assert scopes_that_open(model, lambda: once.append(step_gradients(model, inputs))) == 1
    assert all(torch.equal(first[name], once[0][name]) for name in first)


def test_a_block_with_other_readers_keeps_its_scope():
    model, inputs = memopt.patch(tiny_model("gpt2")).train(), tiny_inputs("gpt2", 2, 16)
    for _ in range(3):
        step_gradients(model, inputs)
    assert scopes_that_open(model, lambda: step_gradients(model, inputs)) >= model.config.num_hidden_layers


@pytest.mark.parametrize(
    "made", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copy_of_a_model_in_use_trains_like_it(made):
    model, inputs = memopt.patch(tiny_model("llama")).train(), tiny_inputs("llama", 2, 16)
    for _ in range(2):
        expected = step_gradients(model, inputs)
    other = made(model)
    for _ in range(2):
        found = step_gradients(other, inputs)
        assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("kind", ["llama", "bert", "gpt2"])
def test_outputs_with_their_graph_are_written_and_read_by_torch(kind: str, tmp_path: Path):
    model, inputs, seen = memopt.patch(tiny_model(kind)).train(), tiny_inputs(kind, 2, 16), []
    for module in model.modules():
        module.register_forward_hook(lambda module, args, output: seen.append(output))
    model(**inputs)
    outputs = [each for each in seen if isinstance(each, torch.Tensor)]
    assert any(spec_of(each) for each in outputs)
    torch.save(outputs, tmp_path / "outputs.pt")
    again = torch.load(tmp_path / "outputs.pt")
    assert all(torch.equal(each, one) for each, one in zip(again, outputs, strict=True))
    assert not any(spec_of(each) for each in again)


def test_unpatching_a_model_in_use_takes_the_linears_back():
    model, inputs = memopt.patch(tiny_model("llama")).train(), tiny_inputs("llama", 2, 16)
    step_gradients(model, inputs)
    assert any(is_swapped(m) for m in model.modules() if isinstance(m, nn.Linear))
    memopt.unpatch(model)
    assert not any(is_swapped(m) for m in model.modules())
    step_gradients(model, inputs)


def test_adapters_that_come_after_steps_keep_what_earlier_ones_keep():
    inputs = tiny_inputs("llama", 2, 16)
    config = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0)
    kept = []
    for trains_first in (False, True):
        model = memopt.patch(tiny_model("llama")).train()
        if trains_first:
            step_gradients(model, inputs)
            step_gradients(model, inputs)
        model = get_peft_model(model, config)
        step_gradients(model, inputs)
        kept.append(account(model, lambda model=model: model(**inputs).loss).saved)
    earlier = memopt.patch(get_peft_model(tiny_model("llama"), config).train())
    step_gradients(earlier, inputs)
    kept.append(account(earlier, lambda: earlier(**inputs).loss).saved)
    assert kept[0] == kept[1] == kept[2]


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_under_foreign_hooks_no_spec_leaves_its_block(name):
    model, inputs = memopt.patch(tiny_model(name)).train(), tiny_inputs(name, 2, 16)
    left = []
    for module in in_blocks(model):
        hook = lambda _, args, output: left.append(output[0] if isinstance(output, tuple) else output)  # noqa: E731
        model.get_submodule(module).register_forward_hook(hook)
    with save_on_cpu():
        model(**inputs).loss.backward()
    assert left
    assert not any(spec_of(output) is not None for output in left)


def test_what_outlives_the_graph_does_not_hold_the_tensors_of_its_spec():
    model, inputs = memopt.patch(tiny_model("bert")).train(), tiny_inputs("bert", 2, 16)
    output = model(**inputs, output_hidden_states=True)
    assert spec_of(output.hidden_states[1]) is not None
    output.loss.backward()
    assert spec_of(output.hidden_states[1]) is None


def test_all_readers_of_a_norm_recompute_it_once(monkeypatch):
    from memopt.kernels.norm import ops

    model, inputs = memopt.patch(tiny_model("llama"), WHOLE_LOGITS).train(), tiny_inputs("llama", 2, 16)
    step_gradients(model, inputs)
    calls, readers = [], []
    affine, forward = ops.recompute_output, RecomputedInputFunction.forward
    monkeypatch.setattr(ops, "recompute_output", lambda *a, **k: calls.append(1) or affine(*a, **k))
    monkeypatch.setattr(RecomputedInputFunction, "forward", lambda *a: readers.append(1) or forward(*a))
    step_gradients(model, inputs)
    layers = model.config.num_hidden_layers
    assert len(readers) == 5 * layers  # q, k, v; gate, up
    assert len(calls) == 2 * layers + 1  # and the head's, behind the last norm
