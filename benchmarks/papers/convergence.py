"""The preset `convergence` of `benchmarks.finetune`: a byte-level Llama learns Python's language reference.

The reference is part of the standard library; a tenth of it, whole topics, is held out. Other presets read it too.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.training import Score, Setting

#: Held-out rows that are scored.
SCORED = 128


@dataclass(frozen=True)
class Shape:
    """The model and its batch."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    batch: int = 8
    seq: int = 64
    learning_rate: float = 3e-3
    dtype: str = "float32"
    device: str = "cpu"


SHAPES = {"cpu": Shape(), "gpu": Shape(16, 2048, 32, 8, 1024, 3e-4, "bfloat16", "cuda")}


def setting(shape: Shape, steps: int) -> Setting:
    """The training of a Llama with random weights."""
    learnt, held = texts(shape.seq, shape.device)
    return Setting(
        partial(_model, shape),
        lambda seed: [{"input_ids": rows, "labels": rows} for rows in drawn(learnt, shape.batch, steps, seed)],
        partial(_score, held[:: max(len(held) // SCORED, 1)], 4 * shape.batch),
        shape.learning_rate,
        shape.device,
        in_fp64=shape.device == "cpu",
    )


def _model(shape: Shape, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=shape.hidden,
        intermediate_size=shape.hidden * 11 // 4,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        max_position_embeddings=shape.seq,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(shape.device, getattr(torch, shape.dtype)).train()


def texts(seq: int, device: str) -> tuple[Tensor, Tensor]:
    """(rows to learn, rows held out) of bytes, each [rows, seq]: every tenth topic is held out."""
    names = sorted(topics)
    parts = ([name for number, name in enumerate(names) if (number % 10 == 0) == held] for held in (False, True))
    learnt, held = (torch.tensor(list("\n".join(topics[name] for name in part).encode())) for part in parts)
    cut = [ids[: len(ids) // seq * seq].view(-1, seq).to(device) for ids in (learnt, held)]
    return cut[0], cut[1]


def drawn(rows: Tensor, batch: int, steps: int, seed: int) -> list[Tensor]:
    """`steps` batches of `rows`, in the order of `seed`."""
    order = random.Random(seed)
    return [rows[order.sample(range(len(rows)), batch)] for _ in range(steps)]


def _score(rows: Tensor, batch: int, model: nn.Module) -> Score:
    chunks = rows.split(batch)
    return Score(sum(float(model(input_ids=each, labels=each).loss) * len(each) for each in chunks) / len(rows))
