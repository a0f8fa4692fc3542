"""What the model of a type saves for backward, predicted from its config alone beside what it really saves.

Every storage counts by itself: bytes, dtype, shape, and the module that allocated it. What no saved-tensor hook sees
counts as live storages. No model is known here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from memopt.errors import MemoptError
from memopt.plan.recipe import DEFAULT_MEMORY_RECIPE, load_recipe
from memopt.prediction.measure import RealStep
from memopt.prediction.setup import Setup
from memopt.reporting.account import Account, account
from memopt.reporting.build import reads_tokens
from memopt.reporting.estimate import quiet, trace_account
from memopt.reporting.training import Precision, Training
from memopt.walk.models.build import build_meta
from memopt.walk.models.config import one_line
from memopt.walk.models.shrink.config import shrunken
from memopt.walk.observe import find_sites
from tests.zoo.examine import small_config

ROWS, TOKENS = 2, 24


@dataclass(frozen=True)
class Compared:
    """One model type, stock or patched. Bytes."""

    model_type: str
    patched: bool
    predicted: int = 0
    saved: int = 0
    """By a real forward: live storages."""
    differences: tuple[str, ...] = ()
    """Storages that only one of the two has."""
    left_out: str = ""
    """Why it cannot be compared."""

    @property
    def equal(self) -> bool:
        """Whether every storage is predicted, and nothing else."""
        return not self.left_out and self.predicted == self.saved and not self.differences


@quiet()
def compare(model_type: str) -> Iterator[Compared]:
    """The small model of a type, stock and patched by ``exact-unfolded``; one row says why where it does not run."""
    try:
        config, name = small_config(model_type)
        form = next(shrunken(config))
        form.architectures = [name]
        model = build_meta(form)
        sites = find_sites(model)
    except Exception as error:  # of transformers: what it cannot build is another test's subject
        yield Compared(model_type, False, left_out=_said(error))
        return
    tokens = TOKENS if reads_tokens(form) else None
    # PyTorch traces the grouped products of experts in bf16 alone.
    precision: Precision = "bf16" if _has_experts(model) else "fp32"
    training = Training(ROWS, tokens, precision, dropout=False, cuda_kernels=False)
    for recipe in (None, load_recipe(DEFAULT_MEMORY_RECIPE)):
        try:
            torch.manual_seed(0)
            step = RealStep(form, training, Setup("sgd"), sites=sites, recipe=recipe)
            real = account(step.model, step.forward, blocks=sites.blocks, sites=sites)
        except Exception as error:
            yield Compared(model_type, recipe is not None, left_out=f"does not run: {_said(error)}")
            return
        try:
            found = trace_account(form, training, sites=sites, recipe=recipe)
        except MemoptError as error:
            yield Compared(model_type, recipe is not None, saved=real.total, left_out=f"not traced: {_said(error)}")
            return
        yield Compared(model_type, recipe is not None, found.total, real.total, tuple(_differences(found, real)))


def _has_experts(model: PreTrainedModel) -> bool:
    try:
        model.set_experts_implementation("grouped_mm")
    except (ValueError, AttributeError):  # no experts, or no choice of how they run
        return False
    return True


def _differences(predicted: Account, real: Account) -> Iterator[str]:
    ours, theirs = _storages(predicted), _storages(real)
    for sign, those in (("predicted alone", ours - theirs), ("real alone", theirs - ours)):
        for (module, dtype, shape, _), count in those.items():
            yield f"{sign}: {count} x {dtype} {list(shape)} of {module or 'the model'}"


def _storages(of: Account) -> Counter[tuple[str, str, tuple[int, ...], int]]:
    return Counter((each.module, each.dtype, each.shape, each.nbytes) for each in of.storages)


def _said(error: Exception) -> str:
    message = getattr(error, "message", None) or f"{type(error).__name__}: {one_line(error)}"
    return str(message)
