"""Training steps leave nothing behind: neither tensors nor nodes of their graphs."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import memopt
from memopt.plan.recipe import load_recipe
from memopt.trace.timeline import Timeline
from tests.factories import MORE_NAMES, NAMES, tiny_inputs, tiny_model
from tests.patches.test_chains import CASES, model_of


def moe(experts: str) -> nn.Module:
    config = Qwen3MoeConfig(
        hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, num_experts=4, num_experts_per_tok=2, vocab_size=67, use_cache=False,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).train()
    model.set_experts_implementation(experts)
    return model


def objects(*, collects: bool = True) -> Counter[str]:
    """How many tensors and nodes of autograd there are, without what has no values and belongs to no step."""
    if collects:
        gc.collect()
    those = (each for each in gc.get_objects() if isinstance(each, Tensor) or type(each).__name__.endswith("Backward0"))
    return Counter(type(each).__name__ for each in those)


def leaks(model: nn.Module, name: str, **options: bool) -> Counter[str]:
    """The objects that a third step leaves behind; `options` are those of :func:`objects`."""
    inputs = tiny_inputs(name, 2, 12)
    found = []
    for _ in range(3):
        output = model(**inputs)
        output.loss.backward()
        del output
        model.zero_grad()
        found.append(objects(**options))
    return found[-1] - found[-2]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
def test_a_step_of_experts_leaves_nothing(experts: str, checkpointing: bool) -> None:
    model = moe(experts)
    memopt.patch(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    assert not leaks(model, "llama")


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("kind", "experts", "_"), CASES)
def test_a_step_of_chains_leaves_nothing(kind: str, experts: str, _: str, checkpointing: bool) -> None:
    model = memopt.patch(model_of(kind, experts, torch.float32))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    assert not leaks(model, "llama")


@pytest.mark.parametrize("recipe", ["exact-unfolded", "exact-levels", "int8"])
@pytest.mark.parametrize("name", [*NAMES, *MORE_NAMES])
@pytest.mark.rotates(3)
def test_a_step_leaves_nothing(name: str, recipe: str) -> None:
    torch.manual_seed(0)
    model = tiny_model(name)
    memopt.patch(model, recipe)
    assert not leaks(model, name)


@pytest.mark.parametrize("skipped", [False, True])
@pytest.mark.parametrize(("name", "recipe"), [("mixtral", "long-context"), ("llama", "long-context"), ("bert", "int8")])
def test_a_step_keeps_no_memory_that_python_does_not_see(name: str, recipe: str, skipped: bool) -> None:
    """A node that holds its own output keeps itself alive, and no object of Python. A skipped step has no backward."""
    settings = ["tiles.tokens=5"] if recipe == "long-context" else []
    model, inputs = memopt.patch(tiny_model(name), load_recipe(recipe, settings)), tiny_inputs(name, 2, 12)
    left = []
    with (timeline := Timeline(model)):
        for _ in range(3):
            loss = model(**inputs).loss
            if not skipped:
                loss.backward()
            del loss
            model.zero_grad()
            gc.collect()
            left.append(sum(storage.nbytes() for storage, _ in timeline.alive()))
    assert left[2] == left[1]


@pytest.mark.parametrize("recipe", ["exact-unfolded", "exact-levels", "long-context"])
@pytest.mark.parametrize("name", ["llama", "bert", "t5"])
def test_a_step_is_freed_without_the_garbage_collector(name: str, recipe: str) -> None:
    """A circle would keep the memory of a step until Python collects it."""
    model = memopt.patch(tiny_model(name), recipe)
    gc.collect()
    gc.disable()
    try:
        assert not leaks(model, name, collects=False)
    finally:
        gc.enable()
