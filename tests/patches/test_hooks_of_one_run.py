"""Hooks that are there in only one of the two runs of a checkpointed block."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import memopt
from memopt.torch_compat import module_hooks
from tests.factories import tiny_inputs, tiny_model
from tests.patches.twice import assert_same
from tests.support.compare import stock_and_patched

RECIPES = {
    "full": ("exact-unfolded", ("checkpointing.method=full",)),
    "attention kept": ("exact-unfolded", ("checkpointing.method=full", "checkpointing.keep=attention")),
    "levels": ("exact-levels", ()),
    "long context": ("long-context", ()),
}
PLACES = {"llama": ("q_proj", "input_layernorm", "mlp", "act_fn"), "bert": ("query", "LayerNorm", "intermediate")}
#: Ways to register a hook that does nothing but note a call.
HOOKS = {
    "forward": lambda module, note: module.register_forward_hook(lambda *_: note()),
    "pre": lambda module, note: module.register_forward_pre_hook(lambda *_: note()),
    "with arguments": lambda module, note: module.register_forward_pre_hook(lambda *_: note(), with_kwargs=True),
    "backward": lambda module, note: module.register_full_backward_hook(lambda *_: note()),
}


def hooked(model: nn.Module, end: str, kind: str, calls: list[int]) -> list[RemovableHandle]:
    there = [module for name, module in model.named_modules() if name.endswith(end)]
    assert there
    return [HOOKS[kind](module, lambda: calls.append(1)) for module in there]


def tables(model: nn.Module) -> list[dict[int, Any]]:
    return [dict(table) for module in model.modules() for table in module_hooks(module)]


@pytest.mark.parametrize("when", ["forward", "between", "other outputs"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("name", PLACES)
@pytest.mark.rotates(3)
def test_hooks_that_are_removed_or_added_before_backward(name: str, kind: str, recipe: str, when: str) -> None:
    inputs, found, counted = tiny_inputs(name), [], []
    for model in stock_and_patched(lambda: tiny_model(name).train(), memopt.load_recipe(*RECIPES[recipe])):
        gradients: dict[str, Any] = {}
        for place in PLACES[name]:
            calls: list[int] = []
            model.zero_grad()
            handles = hooked(model, place, kind, calls) if when == "forward" else []
            loss = model(**inputs).loss
            for handle in handles:
                handle.remove()
            if when == "between":
                handles = hooked(model, place, kind, calls)
            elif when == "other outputs":  # transformers registers hooks of its own in this call
                model(**inputs, output_hidden_states=True, output_attentions=True)
            before = tables(model)
            if kind != "backward":
                counted.append(len(calls))
            loss.backward()
            if kind != "backward" and recipe != "levels" and when != "forward":
                assert len(calls) == counted[-1]  # hooks of the forward run again, as under activation checkpointing
            assert tables(model) == before
            for handle in handles:
                handle.remove()
            gradients |= {f"{place} {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found.append(gradients)
    assert_same(found[1], found[0], 1e-5)
    half = len(counted) // 2
    assert counted[:half] == counted[half:]


@pytest.mark.parametrize("when", ["removed", "one of two removed", "added"])
@pytest.mark.parametrize("kind", ["forward", "with arguments"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_hooks_that_change_outputs_do_so_in_both_runs_or_in_none(recipe: str, kind: str, when: str) -> None:
    inputs, found = tiny_inputs("llama"), []
    for model in stock_and_patched(lambda: tiny_model("llama"), memopt.load_recipe(*RECIPES[recipe])):
        ends = PLACES["llama"]
        there = [module for name, module in model.named_modules() if name.endswith(ends)]

        def register(there: list[nn.Module] = there) -> list[RemovableHandle]:
            if kind == "forward":
                return [
                    module.register_forward_hook(lambda module, given, y: y * 1.5 if isinstance(y, Tensor) else y)
                    for module in there
                ]
            return [
                module.register_forward_pre_hook(
                    lambda module, given, named: ((given[0] * 1.5, *given[1:]), named), with_kwargs=True
                )
                for module in there
            ]

        handles = [] if when == "added" else register()
        if when == "one of two removed":
            [module.register_forward_hook(lambda *_: None) for module in there]
        loss = model(**inputs).loss
        for handle in handles:
            handle.remove()
        if when == "added":
            register()
        loss.backward()
        found.append({name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None})
    assert_same(found[1], found[0], 1e-5)
