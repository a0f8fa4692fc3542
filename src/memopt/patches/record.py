"""What was done to a model, kept on the model itself: copies and pickles of it carry it along."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from memopt.patches.base import PlanView

_ATTRIBUTE = "_memopt_record"


@dataclass(frozen=True)
class Record:
    """The plan that a model was patched by, and what its modules did not admit of it."""

    plan: PlanView
    refused: tuple[tuple[str, str], ...]

    def __deepcopy__(self, memo: dict[int, Any]) -> Record:
        return self  # immutable


def keep_record(model: nn.Module, record: Record) -> None:
    """Keep `record` on `model`; it is no part of its state dict."""
    model.__dict__[_ATTRIBUTE] = record


def record_of(model: nn.Module) -> Record | None:
    """The record of `model`, or of a model that it wraps (PEFT, DDP)."""
    return next((vars(module)[_ATTRIBUTE] for module in model.modules() if _ATTRIBUTE in vars(module)), None)


def drop_record(model: nn.Module) -> None:
    """Forget what was done to `model`."""
    for module in model.modules():
        vars(module).pop(_ATTRIBUTE, None)
