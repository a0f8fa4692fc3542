"""Supervised fine-tuning with TRL: SmolLM2-135M answers whether a film review is good, LoRA, loss on the answer alone.

python examples/sft.py [--steps N]
"""

from __future__ import annotations

import torch
from data import pretrained, reviews, show, steps
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import memopt


def main(count: int) -> None:
    folder = pretrained("SmolLM2-135M-Instruct")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = [conversation(text, good) for text, good in reviews()[:2000]]
    arguments = SFTConfig(
        "out/sft",
        max_steps=count,
        max_length=96,
        per_device_train_batch_size=2,
        gradient_checkpointing=False,
        bf16=False,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    lora = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trainer = SFTTrainer(
        model,
        arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=lora,
        callbacks=[memopt.TrainerCallback()],  # the one line
    )
    trainer.train()
    show([entry["loss"] for entry in trainer.state.log_history if "loss" in entry], memopt.summary(trainer.model))


def conversation(text: str, good: bool) -> dict[str, list[dict[str, str]]]:
    question = {"role": "user", "content": f"Is this review fresh or rotten? {text}"}
    return {"prompt": [question], "completion": [{"role": "assistant", "content": "fresh" if good else "rotten"}]}


if __name__ == "__main__":
    main(steps(60))
