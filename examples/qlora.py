"""QLoRA: adapters on 4-bit weights (bitsandbytes, nf4), which runs on the CPU too; SmolLM2-135M on Python's reference.

python examples/qlora.py [--steps N]
"""

from __future__ import annotations

from typing import Any

import torch
from data import pretrained, reference, show, steps
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

import memopt


def main(count: int) -> None:
    folder = pretrained("SmolLM2-135M-Instruct")
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=nf4)
    prepare: Any = prepare_model_for_kbit_training
    lora = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(prepare(model, use_gradient_checkpointing=False), lora)
    arguments = TrainingArguments(
        "out/qlora",
        max_steps=count,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        bf16=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    rows = reference(AutoTokenizer.from_pretrained(folder), tokens=64)
    trainer = Trainer(adapted, arguments, default_data_collator, rows, callbacks=[memopt.TrainerCallback()])
    trainer.train()
    show([entry["loss"] for entry in trainer.state.log_history if "loss" in entry], memopt.summary(adapted))


if __name__ == "__main__":
    main(steps(60))
