"""What memopt does to a model of another library, with inputs that it guesses, and whether that is right."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn

import memopt
from memopt.errors import MemoptError
from memopt.trace.account import account
from memopt.walk.calls.batch import placed
from memopt.walk.calls.inputs import Call
from memopt.walk.models.config import one_line
from tests.zoo.examine import TOLERANCE, compared
from tests.zoo.libraries import MODELS, LibraryModel


@dataclass
class LibraryRow:
    """One model of a library. Bytes are what a whole forward saves for backward, fp32, batch 2."""

    library: str
    model: str
    status: str = "ok"
    """``ok``, ``wrong``, ``not run`` (no guessed inputs run), or ``skipped`` (its library is not installed)."""
    reason: str = ""
    version: str = ""
    patched: str = ""
    """What was patched, in words."""
    saved_bytes: tuple[int, int] | None = None
    """Stock, patched."""
    difference: float | None = None
    """Largest relative difference of an output or a gradient, fp64, eval and train mode."""


def library_rows(names: list[str]) -> Iterator[dict[str, Any]]:
    """A row for each model whose key contains one of `names`; for all models without any."""
    for model in MODELS:
        if not names or any(name in model.key for name in names):
            yield asdict(examine_library(model))


def examine_library(model: LibraryModel) -> LibraryRow:
    """Build, patch and compare one model."""
    row = LibraryRow(model.library if model.library != "tests" else "", model.name)
    if not model.installed:
        row.status, row.reason = "skipped", f"{model.library} is not installed"
        return row
    try:
        row.version = version(model.library.replace("_", "-"))
    except PackageNotFoundError:
        row.version = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            _examine(row, *built(model))
        except MemoptError as error:
            row.status, row.reason = "not run", error.message
        except Exception as error:
            row.status, row.reason = "wrong", f"{type(error).__name__}: {one_line(error)}"
    return row


def built(model: LibraryModel) -> tuple[nn.Module, dict[str, Any]]:
    """The model in train mode, its norms' weights and every bias random, and a batch."""
    torch.manual_seed(0)
    made = model.make().train()
    for parameter in made.parameters():
        if parameter.dim() < 2:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return made, model.batch()


def _examine(row: LibraryRow, stock: nn.Module, batch: dict[str, Any]) -> None:
    plan = memopt.plan_for(stock, "exact-unfolded")
    row.patched = plan.done
    if not plan.sites.ran or plan.sites.unseen:
        row.status, row.reason = "not run", plan.sites.unseen or plan.sites.notes[0]
        return
    exact, wide = copy.deepcopy(stock).double(), placed(batch, None, torch.float64)
    before = account(stock, lambda: stock(**batch)).total
    memopt.patch(stock)
    row.saved_bytes = before, account(stock, lambda: stock(**batch)).total
    row.difference = max(compared(exact, memopt.patch, Call("", wide)).values())
    if not row.difference <= TOLERANCE:
        row.status, row.reason = "wrong", f"outputs or gradients differ by {row.difference:.1e}"
