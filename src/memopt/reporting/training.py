"""The training step that a report is about: plain data, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Precision = Literal["fp32", "bf16", "fp16", "bf16-mixed", "fp16-mixed"]
Train = Literal["full", "lora"]
Checkpointing = Literal["none", "full"]

ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class Training:
    """How a model is trained, as far as it changes what is saved for backward."""

    batch: int = 1
    seq: int | None = 2048
    """Tokens in a row; None for models that read none."""
    precision: Precision = "bf16"
    """``mixed``: fp32 weights under autocast."""
    train: Train = "full"
    lora_rank: int = 8
    lora_targets: tuple[str, ...] = (ALL_LINEAR,)
    checkpointing: Checkpointing = "none"
    dropout: bool = True
    """False: eval mode, so that no dropout saves a mask."""
    cuda_kernels: bool = True
    """False: attention and dropout as the CPU runs them, to compare with a measurement there."""
    adapter_fp32: bool = False
    """LoRA weights in fp32 beside 16-bit base weights, PEFT's default."""

    def __str__(self) -> str:
        words = [f"batch {self.batch}" + (f" x {self.seq} tokens" if self.seq else ""), self.precision]
        if self.train == "lora":
            words.append(f"LoRA rank {self.lora_rank} on {', '.join(self.lora_targets)}")
        else:
            words.append("full fine-tuning")
        words.append("activation checkpointing" if self.checkpointing == "full" else "no activation checkpointing")
        return ", ".join(words)


def training_of(
    batch: int | None,
    precision: Precision,
    train: Train,
    lora_rank: int,
    lora_targets: Sequence[str],
    checkpointing: Checkpointing = "none",
) -> Training:
    """The training that arguments of `memopt.report` name: one row without `batch`, every linear without targets."""
    return Training(
        batch=batch or 1,
        precision=precision,
        train=train,
        lora_rank=lora_rank,
        lora_targets=tuple(lora_targets) or (ALL_LINEAR,),
        checkpointing=checkpointing,
    )
