"""What `memopt report` says first, from the name of a model or its folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from memopt.checkpoint.patched import is_patched, patched_folder
from memopt.plan.recipe import Recipe
from memopt.prediction.alternatives import answer
from memopt.prediction.cards import find_card
from memopt.prediction.setup import Setup
from memopt.reporting.headline import Headline
from memopt.reporting.subject import Subject, subject
from memopt.reporting.training import ALL_LINEAR, Checkpointing, Precision, Train, training_of


def headline(
    model: str | Path,
    recipe: str | Path | Recipe | None = None,
    *,
    gpu: str | None = None,
    setup: Setup | None = None,
    batch: int | None = None,
    seq: int | None = None,
    precision: Precision = "bf16",
    train: Train = "full",
    lora_rank: int = 8,
    lora_targets: Sequence[str] = (ALL_LINEAR,),
    checkpointing: Checkpointing = "none",
    inputs: Mapping[str, Any] | str | Path | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    about: Subject | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Headline:
    """Whether a training step of `model` fits, what it needs, and what else there is; `memopt report` says it first.

    Arguments and errors are those of `memopt.report`, and:

    Args:
        gpu: name or size of a card: ``rtx4090``, ``24GiB``; without one only the peaks are told.
        setup: optimizer and devices, else AdamW on one device.
        about: the model and how it is trained, where that is known: of `Comparison.subject`.
        tell: called with what is traced next.

    Raises:
        UsageError: no card is named so.
    """
    card = None if gpu is None else find_card(gpu)
    if about is not None:
        return answer(str(model), about, setup or Setup(), card, tell)
    folder = Path(model).expanduser()
    if batch is None and seq is None and inputs is None and folder.is_dir() and is_patched(folder):
        inputs = patched_folder(folder).batch()
    training = training_of(batch, precision, train, lora_rank, lora_targets, checkpointing)
    about = subject(
        model,
        training,
        seq=seq,
        recipe=recipe,
        inputs=inputs,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    return answer(str(model), about, setup or Setup(), card, tell)
