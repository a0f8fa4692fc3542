"""Full fine-tuning with transformers' Trainer: SmolLM2-135M (a Llama) on Python's language reference.

python examples/full.py [--steps N]
"""

from __future__ import annotations

import torch
from data import pretrained, reference, show, steps
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, default_data_collator

import memopt


def main(count: int) -> None:
    folder = pretrained("SmolLM2-135M-Instruct")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    arguments = TrainingArguments(
        "out/full",
        max_steps=count,
        per_device_train_batch_size=2,
        learning_rate=2e-5,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    rows = reference(AutoTokenizer.from_pretrained(folder), tokens=64)
    trainer = Trainer(model, arguments, default_data_collator, rows, callbacks=[memopt.TrainerCallback()])
    trainer.train()
    show([entry["loss"] for entry in trainer.state.log_history if "loss" in entry], memopt.summary(model))


if __name__ == "__main__":
    main(steps(60))
