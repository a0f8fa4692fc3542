"""Gradient accumulation: losses and gradients of micro-batches add up to those of the whole batch, by every recipe."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

import memopt
from tests.factories import tiny_model

#: Of rows in a batch; the last micro-batch of each epoch is incomplete.
LENGTHS = (5, 11, 8, 16, 3, 9, 13)
MICRO = (3, 1, 2, 1)
#: Same codes for the same element, however the rows are split: the gradient is as exact as its sum.
SPLITS_EXACTLY = ("exact-unfolded", "exact-levels", "lowmemory-bp", "approx-2bit", "approx-4bit", "approx-8bit")
#: Rows are rounded in groups or drawn by chance: the loss is exact, the gradient another sample.
AT_RANDOM = ("int8", "mesa", "sampled", "wta-crs")


def rows() -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {"input_ids": ids, "labels": [-100, -100, *ids[2:]]}
        for ids in (torch.randint(3, 67, (length,), generator=generator).tolist() for length in LENGTHS)
    ]


def collated(features: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Padded on the right to the longest row; padding has no label."""
    longest = max(len(feature["input_ids"]) for feature in features)

    def column(name: str, padding: int) -> Tensor:
        return torch.tensor([f[name] + [padding] * (longest - len(f[name])) for f in features])

    batch = {"input_ids": column("input_ids", 0), "labels": column("labels", -100)}
    # Told by the length and not by the id, which may be a token too.
    return {
        **batch,
        "attention_mask": (torch.arange(longest) < torch.tensor([[len(f["input_ids"])] for f in features])).long(),
    }


def patched(recipe: str | None) -> nn.Module:
    model = tiny_model("llama").train()
    return model if recipe is None else memopt.patch(model, memopt.load_recipe(recipe))


def step(recipe: str | None, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Loss and gradient, all parameters' in one vector, of one batch in micro-batches of these sizes."""
    model, given, losses = patched(recipe), iter(rows()), []
    items = sum(label != -100 for row in rows() for label in row["labels"][1:])
    for size in sizes:
        batch = collated([next(given) for _ in range(size)])
        loss = model(**batch, num_items_in_batch=items).loss
        loss.backward()
        losses.append(loss.detach())
    gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    return torch.stack(losses).sum(), torch.cat(gradients)


@functools.cache
def whole_batch() -> tuple[Tensor, Tensor]:
    return step(None, (len(LENGTHS),))


@functools.cache
def rounding() -> tuple[float, float]:
    """How far the stock model's micro-batches are from its whole batch."""
    (loss, gradient), (summed, accumulated) = whole_batch(), step(None, MICRO)
    return float((loss - summed).abs()), float((gradient - accumulated).norm())


@pytest.mark.parametrize("recipe", [*SPLITS_EXACTLY, *AT_RANDOM])
def test_uneven_micro_batches_have_the_loss_of_the_whole_batch(recipe: str) -> None:
    loss, _ = step(recipe, MICRO)
    expected, _ = whole_batch()
    # Two sums of about a hundred fp32 numbers of the size of the loss.
    assert abs(float(loss - expected)) <= rounding()[0] + 8 * torch.finfo(torch.float32).eps * float(expected)


@pytest.mark.parametrize("recipe", SPLITS_EXACTLY)
def test_uneven_micro_batches_have_the_gradient_of_the_whole_batch(recipe: str) -> None:
    _, whole = step(recipe, (len(LENGTHS),))
    _, accumulated = step(recipe, MICRO)
    error = float((accumulated - whole).norm())
    # Both runs round, and each as much as stock's two do together at most; a recomputed tensor adds its own roundings.
    assert error <= 4 * rounding()[1]
    if recipe.startswith("exact"):
        assert float((accumulated - whole_batch()[1]).norm()) <= 4 * rounding()[1]


def trained(recipe: str | None, folder: Path, rows_a_step: tuple[int, int]) -> tuple[list[float], Tensor]:
    """Logged losses and final weights of two epochs in Trainer; (rows in a micro-batch, micro-batches in a step)."""
    model = patched(recipe)
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=rows_a_step[0],
        gradient_accumulation_steps=rows_a_step[1],
        num_train_epochs=2,
        learning_rate=0.1,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        seed=7,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows(), data_collator=collated)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("recipe", ["exact-unfolded", "exact-levels"])
def test_trainer_accumulates_as_it_takes_whole_batches_the_last_incomplete(recipe: str, tmp_path: Path) -> None:
    losses, weights = trained(None, tmp_path, (4, 1))
    stock_losses, stock_weights = trained(None, tmp_path, (2, 2))
    our_losses, our_weights = trained(recipe, tmp_path, (2, 2))
    assert len(losses) == len(our_losses) == 4  # 7 rows, 4 a step, two epochs
    apart = float((stock_weights - weights).norm())
    assert 0 < float((our_weights - weights).norm()) <= 4 * apart
    assert our_losses == pytest.approx(losses, rel=1e-4)
    assert stock_losses == pytest.approx(losses, rel=1e-4)
