"""Replicas of a patched model in one process, as `nn.DataParallel` makes them for each step."""

from __future__ import annotations

import re
import sys
import threading
from collections import Counter
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.parallel import replicate as made_by_torch

import memopt
from memopt.patches.checkpointing.module import BlockRewrite
from memopt.patches.checkpointing.offload import InputsOfThreads
from memopt.patches.swap import swap_state
from memopt.plan.recipe import load_recipe
from tests.factories import tiny_inputs, tiny_model
from tests.support.compare import gradients_of


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> Any:
    """PyTorch's own `replicate`, with copies on the CPU in place of those on devices."""

    def copies(tensors: list[Tensor], devices: list[int], detach: bool = False) -> list[list[Tensor]]:
        return [[tensor.detach().clone() if detach else tensor.clone() for tensor in tensors] for _ in devices]

    module = sys.modules[made_by_torch.__module__]
    monkeypatch.setattr(module, "_broadcast_coalesced_reshape", copies)
    return lambda model, count: made_by_torch(model, range(count))


def _patched(name: str, recipe: str, *settings: str) -> Any:
    model = tiny_model(name, torch.float64)
    memopt.patch(model, load_recipe(recipe, ["loss.method=none", *settings]))
    return model


def _gradients(model: nn.Module, losses: list[Tensor]) -> dict[str, Tensor]:
    return gradients_of(model, torch.stack(losses).sum())


def _batches(name: str) -> list[dict[str, Tensor]]:
    return [tiny_inputs(name, seed=seed, dtype=torch.float64) for seed in (0, 1)]


def _nodes(loss: Tensor) -> Counter[str]:
    """How many nodes of each kind the graph of `loss` has, apart from the copies of a replica's weights."""
    left, seen = [loss.grad_fn], {None}
    while left:
        if (node := left.pop()) not in seen:
            seen.add(node)
            left += [before for before, _ in node.next_functions]
    return Counter(each.name() for each in seen if each and not re.search("AccumulateGrad|Clone", each.name()))


@pytest.mark.parametrize(("name", "recipe"), [("llama", "exact-levels"), ("t5", "exact-unfolded")])
def test_a_replica_trains_as_in_stock(name: str, recipe: str, replicas: Any) -> None:
    model, stock = _patched(name, recipe), tiny_model(name, torch.float64)
    batches = _batches(name)
    expected = _gradients(stock, [stock(**batch).loss for batch in batches])
    pairs = zip(replicas(model, 2), batches, strict=True)
    _agree(_gradients(model, [replica(**batch).loss for replica, batch in pairs]), expected)


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("llama", "exact-levels"),
        ("t5", "exact-unfolded"),
        ("bert", "sampled"),
        ("lora", "sampled"),
        ("bert", "exact-levels"),
    ],
)
def test_a_replica_has_the_graph_of_the_model(name: str, recipe: str, replicas: Any) -> None:
    base = "llama" if name == "lora" else name
    model = _patched(base, recipe, "checkpointing.method=none")
    wide = tiny_inputs(base, seq=32, dtype=torch.float64)
    if name == "lora":
        model = get_peft_model(model, LoraConfig(target_modules=["o_proj", "down_proj"]))
    if name == "bert":  # linears whose input has no gradient
        model.bert.embeddings.requires_grad_(False)
    model(**wide).loss.backward()  # its linears read recompute specs from now on
    assert _nodes(replicas(model, 1)[0](**wide).loss) == _nodes(model(**wide).loss)


def test_a_replica_of_a_changed_module_runs_its_stock_forward(replicas: Any) -> None:
    model = _patched("llama", "exact-unfolded")
    stock, inputs = _nodes(tiny_model("llama", torch.float64)(**_batches("llama")[0]).loss), _batches("llama")[0]
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Tanh()
    loss = replicas(model, 1)[0](**inputs).loss
    assert _nodes(loss) == _nodes(model(**inputs).loss)
    assert _nodes(loss)["TanhBackward0"] == stock["SiluBackward0"]


def test_a_replica_of_an_unpatched_module_inside_the_class_of_a_tool_runs(replicas: Any) -> None:
    model, (inputs, _) = _patched("llama", "exact-unfolded"), _batches("llama")
    mlp = model.model.layers[0].mlp
    mlp.__class__ = type("Tool", (type(mlp),), {})
    memopt.unpatch(model)
    assert torch.equal(replicas(model, 1)[0](**inputs).loss, model(**inputs).loss)


def _agree(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for key, gradient in got.items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-6, atol=1e-6)


def test_a_checkpointed_block_runs_while_its_other_replica_does(replicas: Any) -> None:
    model, (mine, others) = _patched("bert", "long-context"), _batches("bert")
    stock = tiny_model("bert", torch.float64)
    expected = _gradients(stock, [stock(**mine).loss, stock(**others).loss])
    first, second = replicas(model, 2)
    states = [swap_state(each.bert.encoder.layer[0]) for each in (model, first, second)]
    assert len({id(state.state) for state in states if isinstance(state, BlockRewrite)}) == 3
    losses: list[Tensor] = []

    def run(*_: Any) -> None:
        if not losses and threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=lambda: losses.append(second(**others).loss))
            thread.start()
            thread.join()

    # Replicas have the tables of hooks of the model.
    hook = model.bert.encoder.layer[0].attention.register_forward_pre_hook(run)
    losses.append(first(**mine).loss)
    hook.remove()
    _agree(_gradients(model, losses), expected)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_replica_evaluates_logits_of_many_classes(name: str, replicas: Any) -> None:
    model, stock = (tiny_model(name, vocab_size=32000).eval() for _ in range(2))
    memopt.patch(model)
    inputs = tiny_inputs(name, 4, 256)
    with torch.no_grad():
        assert torch.equal(replicas(model, 1)[0](**inputs).logits, stock(**inputs).logits)
    with pytest.warns(UserWarning, match=r"nn\.DataParallel gathers all logits"):
        replicas(model, 1)[0](**tiny_inputs(name))


def test_offloaded_inputs_of_each_thread_are_apart() -> None:
    inputs = InputsOfThreads()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(inputs.here))
    thread.start()
    thread.join()
    assert inputs.here is inputs.here
    assert found[0] is not inputs.here
