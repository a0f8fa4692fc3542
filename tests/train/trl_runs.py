"""Runs of TRL's trainers on tiny models: a tokenizer, data and arguments, all made here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import trl
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.factories import VOCAB_SIZE
from tests.integrations.test_trainer import QUIET

STEPS, BATCH = 3, 2


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Words w3 to w66 and the special tokens of `tiny_model`."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{number}": number for number in range(3, VOCAB_SIZE)}}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def texts(seed: int) -> list[str]:
    """Of several lengths, so that batches are padded."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [4 + 3 * (row % 3) for row in range(STEPS * BATCH)]
    return [" ".join(f"w{word}" for word in torch.randint(3, VOCAB_SIZE, (n,), generator=generator)) for n in lengths]


_DATA: Mapping[str, Any] = {
    "SFT": lambda: {"text": texts(0)},
    "DPO": lambda: {"prompt": texts(0), "chosen": texts(1), "rejected": texts(2)},
    "GRPO": lambda: {"prompt": texts(0)},
    "KTO": lambda: {"prompt": texts(0), "completion": texts(1), "label": [True, False] * (STEPS * BATCH // 2)},
}


def trainer(kind: str, model: Any, folder: Path, *callbacks: Any, more: Mapping[str, Any] = {}, **settings: Any) -> Any:
    """TRL's trainer `kind` (SFT, DPO, GRPO, KTO) for `STEPS` steps on the CPU; `more` are its own arguments."""
    arguments = getattr(trl, f"{kind}Config")(
        output_dir=str(folder),
        **QUIET,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        **{"bf16": False, "gradient_checkpointing": False, **settings},
    )
    own = {"args": arguments, "processing_class": tokenizer(), "callbacks": list(callbacks), **more}
    own.setdefault("train_dataset", datasets.Dataset.from_dict(_DATA[kind]()))
    return getattr(trl, f"{kind}Trainer")(model, **own)


def losses(run: Any) -> list[float]:
    """The loss and the norm of the gradient of each step; some losses are zero by their definition (GRPO's)."""
    run.train()
    return [row[key] for row in run.state.log_history if "loss" in row for key in ("loss", "grad_norm")]
