"""An encoder learns to classify: MiniLM-L6 (a BERT) on sentences of film reviews, with its stock dropouts.

python examples/encoder.py [--steps N]
"""

from __future__ import annotations

from typing import Any

import torch
from data import pretrained, reviews, show, steps
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

import memopt

TESTS = 200


def main(count: int) -> None:
    torch.manual_seed(0)
    folder = pretrained("all-MiniLM-L6-v2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2, dtype=torch.float32)
    rows = [{**tokenizer(text, truncation=True, max_length=64), "labels": int(good)} for text, good in reviews()]
    arguments = TrainingArguments(
        "out/encoder",
        max_steps=count,
        per_device_train_batch_size=16,
        learning_rate=1e-4,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    trainer = Trainer(
        model,
        arguments,
        DataCollatorWithPadding(tokenizer),
        rows[TESTS:],
        rows[:TESTS],
        compute_metrics=accuracy,
        callbacks=[memopt.TrainerCallback()],  # the one line
    )
    trainer.train()
    show([entry["loss"] for entry in trainer.state.log_history if "loss" in entry], memopt.summary(model))
    print(f"right on {trainer.evaluate()['eval_accuracy']:.0%} of {TESTS} sentences of other films")


def accuracy(found: Any) -> dict[str, float]:
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


if __name__ == "__main__":
    main(steps(100))
