"""`memopt.patch(model, budget=...)`: the plan for a model in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt.errors import ModelError, NegativeVerdict
from memopt.prediction.planner import live
from memopt.prediction.planner.choice import Choice
from tests.factories import tiny_inputs, tiny_model


def test_a_model_is_patched_by_the_plan_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Choice] = []
    plan_model = live.plan_model

    def noted(*arguments: Any, **options: Any) -> Choice:
        asked.append(plan_model(*arguments, **options))
        return asked[-1]

    monkeypatch.setattr(live, "plan_model", noted)
    model = memopt.patch(tiny_model("llama").train(), budget="24GiB", batch=2, seq=32)
    [choice] = asked
    assert choice.plan.total <= choice.budget == 24 << 30
    assert "batch 2 x 32 tokens, fp32, full fine-tuning" in choice.training
    assert str(memopt.summary(model)).splitlines()[:2] == [
        f"Patched by recipe 'budget-24GiB': {memopt.summary(model).modules} modules run memopt's forward.",
        f"  {choice.plan.words}",
    ]
    stock = tiny_model("llama").train()
    stock.load_state_dict(model.state_dict())
    ids = tiny_inputs("llama")["input_ids"]
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, stock(input_ids=ids).logits)


def test_a_budget_that_nothing_fits_leaves_the_model_as_it_was() -> None:
    model = tiny_model("llama")
    with pytest.raises(NegativeVerdict, match=r"No exact plan of LlamaForCausalLM fits in 0\.10 GiB"):
        memopt.patch(model, budget="100MiB", seq=32)
    assert not memopt.summary(model).modules


def test_a_model_without_a_config_needs_a_recipe() -> None:
    with pytest.raises(ModelError, match="A budget needs a transformers model"):
        memopt.patch(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)), budget="24GiB")
