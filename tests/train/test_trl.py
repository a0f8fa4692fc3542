"""`memopt.TrainerCallback` under TRL's trainers, which put another forward in place of the model's."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

import memopt
from memopt.patches.apply import is_patched
from memopt.patches.sampled_linear.visits import visits_of
from memopt.sampling import INDEX, remember_gradients
from tests.factories import tiny_model
from tests.train.trl_runs import BATCH, STEPS, losses, trainer

LORA = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")


def lengths(completions: list[str], **kwargs: Any) -> list[float]:
    """A reward that differs within a group."""
    return [float(sum(map(ord, text))) / 1e4 for text in completions]


@pytest.mark.parametrize(
    ("kind", "settings", "more"),
    [
        ("SFT", {}, {}),
        ("SFT", {"gradient_checkpointing": True}, {"peft_config": LORA}),
        ("DPO", {}, {"peft_config": LORA}),
        ("KTO", {}, {"peft_config": LORA}),
        ("GRPO", {"num_generations": 2, "max_completion_length": 6}, {"reward_funcs": lengths}),
    ],
    ids=["sft", "sft-lora-checkpointing", "dpo-lora", "kto-lora", "grpo"],
)
def test_losses_are_those_of_patching_by_hand_and_of_the_stock_model(
    kind: str, settings: dict[str, Any], more: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(model: Any, *callbacks: Any) -> list[float]:
        torch.manual_seed(0)  # of the adapters
        return losses(trainer(kind, model, tmp_path, *callbacks, more=more, **settings))

    with caplog.at_level(logging.INFO, "memopt"):
        with_callback = run(model := tiny_model("llama"), memopt.TrainerCallback())
    assert is_patched(model)
    assert "patched" in caplog.text
    assert caplog.text.count("now one of trl.") == 1  # whose loss it is
    caplog.clear()
    assert with_callback == run(memopt.patch(tiny_model("llama")))
    assert caplog.text.count("now one of trl.") == 1  # without the callback too
    # GRPO's losses are sums of terms near 1 that cancel: they are known to an ulp of those.
    assert with_callback == pytest.approx(run(tiny_model("llama")), rel=1e-5, abs=2**-23)
    assert len(with_callback) == 2 * STEPS
    assert all(with_callback[1::2])


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Padded on the right, with the numbers of the samples."""
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([[*row["input_ids"], *[0] * (longest - len(row["input_ids"]))] for row in rows])
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "labels": torch.where(ids == 0, -100, ids),
        INDEX: torch.tensor([row[INDEX] for row in rows]),
    }


def test_sampled_linears_learn_where_padding_is_and_which_samples_come(tmp_path: Path) -> None:
    run = trainer(
        "SFT",
        model := tiny_model("gpt2"),
        tmp_path,
        memopt.TrainerCallback("sampled"),
        more={"data_collator": collate},
        remove_unused_columns=False,
    )
    run.train_dataset = run.train_dataset.add_column(INDEX, range(STEPS * BATCH))
    assert "forward" in vars(model)  # TRL's
    (visits,) = visits_of(model)
    memory = remember_gradients(model, STEPS * BATCH, max_tokens=16)
    assert all(losses(run))
    visits.padding.settle()
    memory.flush()
    assert any(visits.padding.leaves_out(linear) for linear in range(len(visits.padding)))
    assert memory.written
