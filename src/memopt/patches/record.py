"""The record of the rewrites of a model, kept on the model itself, so that copies and pickles have it too."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from memopt.patches.base import PlanView

_ATTRIBUTE = "_memopt_record"
_logger = logging.getLogger("memopt")
_said: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Record:
    """The plan that was applied to a model, and the refusals."""

    plan: PlanView
    """The plan, in which refused sites are marked as not rewritten."""
    refused: tuple[tuple[str, str], ...]
    """(module, reason) of planned rewrites that were refused because the live module does not admit them."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Record:
        return self  # immutable


def keep_record(model: nn.Module, record: Record) -> None:
    """Keep `record` on `model`; the state dict does not contain it."""
    model.__dict__[_ATTRIBUTE] = record


def record_of(model: nn.Module) -> Record | None:
    """The record of `model`, or of a model inside it (PEFT and DDP wrap models); None without one."""
    return next((vars(module)[_ATTRIBUTE] for module in _recorded(model)), None)


def warn_once(model: nn.Module, remarks: Iterable[str]) -> None:
    """Log each of `remarks` once for a patched model, or for the patched model inside `model`."""
    for module in _recorded(model):
        said = _said.setdefault(module, set())
        for remark in remarks:
            if remark not in said:
                said.add(remark)
                _logger.warning("%s", remark)
        return


def drop_record(model: nn.Module) -> None:
    """Remove the record of `model` and of models inside it."""
    for module in list(_recorded(model)):
        del vars(module)[_ATTRIBUTE]
        _said.pop(module, None)


def is_recorded(module: nn.Module) -> bool:
    """Whether `module` is a patched model."""
    return _ATTRIBUTE in vars(module)


def recorded_in(model: nn.Module) -> nn.Module | None:
    """`model`, or the patched model inside it; None without one."""
    return next(_recorded(model), None)


def _recorded(model: nn.Module) -> Iterator[nn.Module]:
    return filter(is_recorded, model.modules())
