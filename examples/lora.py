"""LoRA in a training loop of your own: SmolLM2-135M (a Llama) on Python's language reference, bf16 weights.

python examples/lora.py [--steps N]
"""

from __future__ import annotations

from typing import Any

import torch
from data import pretrained, reference, show, steps
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import memopt


def main(count: int) -> None:
    torch.manual_seed(0)
    folder = pretrained("SmolLM2-135M-Instruct")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    memopt.patch(model)  # the one line; before or after get_peft_model
    adapted = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")).train()
    rows = reference(AutoTokenizer.from_pretrained(folder), tokens=64)
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=2, shuffle=True, collate_fn=collate)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for _, batch in zip(range(count), loader, strict=False):
        loss = adapted(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    adapted.save_pretrained("out/lora")  # a plain PEFT adapter
    show(losses, memopt.summary(adapted))


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


if __name__ == "__main__":
    main(steps(60))
