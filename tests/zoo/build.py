"""The small model of a model type of transformers that is examined, and the row that its examination fills."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from memopt.errors import MemoptError
from memopt.walk.calls.inputs import Calls
from memopt.walk.calls.parts import every_call
from memopt.walk.calls.twin import build_twin
from memopt.walk.models.build import instantiate
from memopt.walk.models.config import load_config, one_line
from memopt.walk.models.shrink.config import shrunken
from tests.zoo.config import complete, complete_for_runs, default_config

#: Empty fields of a default config that are filled before its type counts as one that cannot be built.
MAX_FILLED = 10


@dataclass
class Row:
    """What became of one model type. Counts are of sites; bytes are of the twin in bf16, batch 2."""

    model_type: str
    status: str = "ok"
    """``ok``, ``wrong``, ``not compared`` (it runs, but stock has no gradients, or does not repeat itself),
    ``not run``, ``not built``, or ``no model`` (a config without a class of its own)."""
    reason: str = ""
    model_class: str = ""
    main_input: str = ""
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    """Kind of site -> action -> number."""
    reasons: dict[str, dict[str, int]] = field(default_factory=dict)
    """Kind of site -> why it is left, or not folded -> number."""
    foldable_on_request: int = 0
    """Norms that are shared, because their fold would change an auxiliary output; a recipe can ask for it."""
    unshared: int = 0
    """Norms of the last dimension, gated ones included, that are left as they are, whoever keeps their output."""
    unexplained: int = 0
    """Sites that are left without a reason."""
    proof_error: float | None = None
    differences: dict[str, float] = field(default_factory=dict)
    """What was compared -> largest relative difference."""
    refused: list[tuple[str, str]] = field(default_factory=list)
    block_bytes: tuple[int, int] | None = None
    """Kept for backward by one more layer: stock, patched."""
    model_bytes: tuple[int, int] | None = None
    """Kept for backward by a model of three layers: stock, patched."""
    step_peak: tuple[int, int] | None = None
    """Of a step at the config's own widths, three layers, bf16, traced without weights: stock, patched."""
    has_loss_head: bool = False
    """Whether the model that was traced computes its loss from logits over a vocabulary."""
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0


def model_types() -> list[str]:
    """Every model type of the installed transformers, sorted."""
    return sorted(CONFIG_MAPPING)


class Stop(Exception):
    """Why an examination goes no further."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


def completed(row: Row, examine: Callable[[Row], None]) -> Row:
    """`row`, which `examine` has filled; it may raise a :class:`Stop`."""
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            examine(row)
        except Stop as stop:
            row.status, row.reason = stop.status, stop.reason
    row.seconds = round(time.perf_counter() - started, 2)
    return row


def runnable(row: Row) -> tuple[PreTrainedConfig, PreTrainedModel, Calls]:
    """The type's config, filled where it was empty, a small model of it and its calls."""
    config = config_of(row)
    twin = twin_of(config)
    calls = every_call(twin)
    if not calls and complete_for_runs(config):
        twin = twin_of(config)
        calls = every_call(twin)
    if not calls:
        label, error = calls.errors[0] if calls.errors else ("", "no inputs can be made from its forward's signature")
        raise Stop("not run", f"{label}: {error}" if label else error)
    return config, twin, calls


def config_of(row: Row) -> PreTrainedConfig:
    """The default config of the type of `row`."""
    try:
        return default_config(row.model_type)
    except Exception as error:
        raise Stop("not built", f"no default config: {type(error).__name__}: {one_line(error)}") from None


def twin_of(config: PreTrainedConfig) -> PreTrainedModel:
    """A small model of `config`, whose empty fields are filled, in place, where the model cannot do without."""
    for _ in range(MAX_FILLED):
        try:
            return build_twin(config)
        except MemoptError as error:
            failure = error.message
            if "no model class" in failure:
                raise Stop("no model", failure) from None
            if not complete(config, failure):
                break
    raise Stop("not built", failure)


def small_config(model_type: str) -> tuple[PreTrainedConfig, str]:
    """A config of the type that its model can be built from, and the name of the model's class.

    Raises:
        Exception: it cannot.
    """
    config = config_of(Row(model_type))
    return config, type(twin_of(config)).__name__


def saved_twin(model_type: str, folder: Path) -> bool:
    """Write a small model of the type as `save_pretrained` does; False where it cannot be built, saved and read."""
    try:
        config = config_of(Row(model_type))
        twin_of(config)
        instantiate(next(shrunken(config)), device="cpu", dtype=torch.float32).save_pretrained(folder)
        load_config(folder)
    except Exception:  # of transformers: what it cannot build is another test's subject
        return False
    return True
