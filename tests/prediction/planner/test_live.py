"""`memopt.patch(model, budget=...)`: the plan for a model in memory."""

from __future__ import annotations

import warnings
from typing import Any, NoReturn

import peft
import pytest
import torch
from torch import nn

import memopt
from memopt.errors import ModelError, NegativeVerdict, UsageError
from memopt.plan.recipe import load_recipe
from memopt.prediction.peak import combine
from memopt.prediction.planner import plan, training
from memopt.prediction.planner.choice import Choice
from memopt.prediction.setup import Run, Setup
from memopt.trace.events import Trace
from tests.factories import tiny_inputs, tiny_model


def test_a_model_is_patched_by_the_plan_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Choice] = []
    plan_model = training.plan_model

    def noted(*arguments: Any, **options: Any) -> Choice:
        asked.append(plan_model(*arguments, **options))
        return asked[-1]

    monkeypatch.setattr(training, "plan_model", noted)
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


def test_a_plan_counts_autocast_optimizer_and_micro_batches_of_a_run() -> None:
    run = Run(Setup("sgd", accumulation=3), autocast="bf16")
    found = training.plan_model(tiny_model("llama"), "24GiB", load_recipe("exact-unfolded"), seq=16, run=run)
    assert "bf16-mixed, full fine-tuning" in found.training
    assert "sgd, 3 micro-batches" in found.training
    assert (found.plan.batch, found.plan.accumulation) == (1, 3)


def test_a_model_in_16_bits_may_run_under_autocast() -> None:
    for run, precision in ((Run(autocast="bf16"), "bf16-autocast"), (Run(), "bf16")):
        found = training.plan_model(
            tiny_model("llama", torch.bfloat16), "24GiB", load_recipe("exact-unfolded"), seq=16, run=run
        )
        assert f"{precision}, full fine-tuning" in found.training


def test_a_plan_counts_the_attention_that_the_model_or_the_recipe_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    eager, changed = tiny_model("llama"), tiny_model("llama")
    eager.set_attn_implementation("eager")
    set_to_eager, saved = "attention.implementation=eager", "softmaxes.method=none"
    traces = [
        first_trace(monkeypatch, model, *settings, batch=512, seq=64)
        for model, settings in (
            (eager, []), (changed, [set_to_eager]), (tiny_model("llama"), []), (changed, [set_to_eager, saved])
        )
    ]  # fmt: skip
    assert "attention by eager" in str(traces[0].training)
    totals = [combine(traced, Setup()).total for traced in traces]
    assert totals[0] == totals[1] != totals[2]
    assert totals[1] < totals[3]  # so its softmaxes were seen


@pytest.mark.parametrize("frozen", [("embed_tokens", "layers.0", "norm"), ("layers.1.mlp.up_proj",), ()], ids=str)
def test_a_plan_trains_what_the_model_trains(monkeypatch: pytest.MonkeyPatch, frozen: tuple[str, ...]) -> None:
    model = tiny_model("llama", num_hidden_layers=7)
    for name in frozen:
        model.model.get_submodule(name).requires_grad_(False)
    traced = first_trace(monkeypatch, model)
    assert traced.training.frozen == tuple(f"model.{name}" for name in frozen)
    assert forms(each for each in traced.parameters if each.trained) == forms(
        each for each in model.parameters() if each.requires_grad
    )


def test_a_model_whose_weights_are_all_frozen_is_planned_as_if_all_were_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Adapters may be added after the patch."""
    model = tiny_model("llama").requires_grad_(False)
    assert all(each.trained for each in first_trace(monkeypatch, model).parameters if not each.is_buffer)


def test_a_budget_that_nothing_fits_leaves_the_model_as_it_was() -> None:
    model = tiny_model("llama")
    with pytest.raises(NegativeVerdict, match=r"No exact plan of LlamaForCausalLM fits in 100 MiB"):
        memopt.patch(model, budget="100MiB", seq=32)
    assert not memopt.summary(model).modules


@pytest.mark.parametrize("budget", [0, -1, 1.5, True])
def test_a_budget_that_is_no_size_is_refused(budget: Any) -> None:
    with pytest.raises(UsageError, match="A budget is a number of bytes, a size or a card, not"):
        memopt.patch(tiny_model("llama"), budget=budget, seq=32)


def test_the_log_says_what_was_planned_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "memopt"):
        memopt.patch(tiny_model("llama"), budget="24GiB", batch=2, seq=32)
    assert caplog.messages[0].startswith("planned for: batch 2 x 32 tokens, fp32")


class Seen(Exception):
    """The first trace of a plan."""


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"], r".*layers\.1\.mlp\.up_proj"])
def test_a_plan_has_the_adapters_of_the_model(monkeypatch: pytest.MonkeyPatch, targets: Any) -> None:
    def first(traced: Trace, setup: Setup) -> NoReturn:
        raise Seen(traced)

    monkeypatch.setattr(plan, "combine", first)
    config = peft.LoraConfig(r=4, target_modules=targets)
    model = peft.get_peft_model(tiny_model("llama", torch.bfloat16), config)  # its adapters are in fp32
    with pytest.raises(Seen) as seen:
        training.plan_model(model, "24GiB", load_recipe("exact-unfolded"), seq=16)
    trained = sorted((tuple(each.shape), str(each.dtype)) for each in model.parameters() if each.requires_grad)
    [traced] = seen.value.args
    assert sorted((each.shape, str(each.dtype)) for each in traced.parameters if each.trained) == trained


def first_trace(
    monkeypatch: pytest.MonkeyPatch, model: Any, *settings: str, batch: int | None = None, seq: int = 16
) -> Trace:
    """The trace that a plan for `model` begins with."""

    def first(traced: Trace, setup: Setup) -> NoReturn:
        raise Seen(traced)

    monkeypatch.setattr(plan, "combine", first)
    with pytest.raises(Seen) as seen:
        training.plan_model(model, "24GiB", load_recipe("exact-unfolded", settings), batch=batch, seq=seq)
    [traced] = seen.value.args
    assert isinstance(traced, Trace)
    return traced


def forms(parameters: Any) -> list[tuple[tuple[int, ...], str]]:
    return sorted((tuple(each.shape), str(each.dtype)) for each in parameters)


@pytest.mark.parametrize(
    "options",
    [
        {"use_dora": True, "rank_pattern": {"down_proj": 7}},
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"rank_pattern": {r"layers\.1\.mlp\.down_proj": 7}},
        {"layers_to_transform": [1]},
        {"bias": "all", "init_lora_weights": "pissa"},
        {"trainable_token_indices": [1, 2]},
    ],
)
@pytest.mark.rotates(3)
def test_a_plan_trains_whatever_the_config_of_the_adapters_says(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    base = tiny_model("llama", num_hidden_layers=7, attention_bias=True)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], **options)
    model = peft.get_peft_model(base, config)
    traced = first_trace(monkeypatch, model)
    assert forms(each for each in traced.parameters if each.trained) == forms(
        each for each in model.parameters() if each.requires_grad
    )


def test_a_plan_has_the_dropout_of_the_adapters_and_checkpointing_that_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.1)
    model = peft.get_peft_model(tiny_model("llama"), config)
    traced = first_trace(monkeypatch, model)
    assert any("dropout" in event.storage.operation for event in traced.events)
    assert traced.training.checkpointing == "none"
    model.gradient_checkpointing_enable()
    warnings.simplefilter("error", FutureWarning)
    assert first_trace(monkeypatch, model).training.checkpointing == "full"


def test_the_active_one_of_several_adapters_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (peft.LoraConfig(r=rank, target_modules=["q_proj"]) for rank in (4, 6))
    model = peft.get_peft_model(tiny_model("llama"), first)
    model.add_adapter("second", second)
    model.set_adapter("second")
    trained = [each for each in model.parameters() if each.requires_grad]
    traced = first_trace(monkeypatch, model)
    assert forms(each for each in traced.parameters if each.trained) == forms(trained)
    assert {min(each.shape) for each in trained} == {6}


def test_a_trace_that_trains_other_parameters_than_the_model_is_no_plan() -> None:
    model = peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    adapter = next(module for name, module in model.named_modules() if name.endswith("q_proj.lora_A.default"))
    adapter.weight = nn.Parameter(torch.zeros(5, 8))
    with pytest.raises(ModelError, match="trained in another way"):
        training.plan_model(model, "24GiB", load_recipe("exact-unfolded"), seq=16)


def test_variants_of_lora_on_four_bits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memopt.trace.adapters.Linear4bit", nn.Linear)  # real ones need bitsandbytes
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True)
    model = peft.get_peft_model(tiny_model("llama"), config)
    with pytest.raises(ModelError, match="DoRA and other variants"):
        training.plan_model(model, "24GiB", load_recipe("exact-unfolded"), seq=16)


def test_adapters_other_than_loras_are_refused() -> None:
    config = peft.IA3Config(target_modules=["v_proj", "down_proj"], feedforward_modules=["down_proj"])
    with pytest.raises(ModelError, match="IA3Config is neither"):
        training.plan_model(peft.get_peft_model(tiny_model("llama"), config), "24GiB", load_recipe("exact-unfolded"))


def test_a_model_without_a_config_needs_a_recipe() -> None:
    with pytest.raises(ModelError, match="A budget needs a transformers model"):
        memopt.patch(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)), budget="24GiB")
