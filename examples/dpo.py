"""Preferences with TRL's DPO: SmolLM2-135M prefers the right verdict on a film review to the wrong one, LoRA.

python examples/dpo.py [--steps N]
"""

from __future__ import annotations

import torch
from data import pretrained, reviews, show, steps
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

import memopt


def main(count: int) -> None:
    folder = pretrained("SmolLM2-135M-Instruct")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = [preference(text, good) for text, good in reviews()[:2000]]
    arguments = DPOConfig(
        "out/dpo",
        max_steps=count,
        max_length=96,
        per_device_train_batch_size=1,
        gradient_checkpointing=False,
        bf16=False,
        learning_rate=1e-4,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    lora = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")  # the reference is the model without it
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trainer = DPOTrainer(
        model,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=lora,
        callbacks=[memopt.TrainerCallback()],  # the one line
    )
    trainer.train()
    show([entry["loss"] for entry in trainer.state.log_history if "loss" in entry], memopt.summary(trainer.model))


def preference(text: str, good: bool) -> dict[str, list[dict[str, str]]]:
    right, wrong = ("fresh", "rotten") if good else ("rotten", "fresh")
    question = {"role": "user", "content": f"Is this review fresh or rotten? {text}"}
    answers = {"chosen": right, "rejected": wrong}
    return {"prompt": [question], **{name: [{"role": "assistant", "content": its}] for name, its in answers.items()}}


if __name__ == "__main__":
    main(steps(60))
