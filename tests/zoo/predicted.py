"""The bytes that a step of a type's model saves and needs at its peak: predicted from its config alone, and real.

Every saved storage counts by itself: bytes, dtype, shape, and the module that allocated it. What no saved-tensor hook
sees counts as live storages. Peaks are sums. No model is known here.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from memopt.errors import MemoptError
from memopt.plan.recipe import DEFAULT_MEMORY_RECIPE, Recipe, load_recipe
from memopt.prediction.measure import RealStep
from memopt.prediction.peak import predict
from memopt.prediction.setup import Setup
from memopt.prediction.subject import reads_tokens
from memopt.trace.account import Account, account
from memopt.trace.estimate import quiet
from memopt.trace.trace import trace_account
from memopt.trace.training import Precision, Step, Training
from memopt.walk.models.build import build_meta
from memopt.walk.models.config import one_line
from memopt.walk.models.shrink.config import shrunken
from memopt.walk.observe import find_sites
from tests.zoo.build import small_config
from tests.zoo.examine import MAX_WEIGHED

SETUP = Setup("sgd")
ROWS, TOKENS = 2, 24
#: Scalars may live until Python collects them, and the steps are small.
PEAK = 0.01


@dataclass(frozen=True)
class Compared:
    """One model type, stock or patched. Bytes."""

    model_type: str
    patched: bool
    predicted: int = 0
    saved: int = 0
    """By a real forward: live storages."""
    differences: tuple[str, ...] = ()
    """Saved storages that only one of the two has."""
    predicted_peak: int = 0
    peak: int = 0
    """Live bytes at the peak of a real second step with SGD."""
    left_out: str = ""
    """Why it cannot be compared."""

    @property
    def equal(self) -> bool:
        """Whether every saved storage is predicted, and nothing else, and the peak to `PEAK`."""
        is_saved = self.predicted == self.saved and not self.differences
        return not self.left_out and is_saved and abs(self.predicted_peak - self.peak) <= PEAK * self.peak


@quiet()
def compare(model_type: str) -> Iterator[Compared]:
    """A small model of a type, stock and patched by ``exact-unfolded``; one row says why where it does not run."""
    why = "no small form builds"
    try:
        config, name = small_config(model_type)
        for form in itertools.islice(shrunken(config), MAX_WEIGHED):
            form.architectures = [name]
            try:
                steps = _Steps(form)
                stock = steps.real(None)
                break
            except Exception as error:
                why = _said(error)
        else:
            raise MemoptError(why)
    except Exception as error:  # of transformers: what it cannot build or run is another test's subject
        yield Compared(model_type, False, left_out=f"does not run: {_said(error)}")
        return
    for recipe in (None, load_recipe(DEFAULT_MEMORY_RECIPE)):
        real, peak = stock if recipe is None else steps.real(recipe)
        try:
            step = Step(form, steps.training, steps.sites, recipe)
            found, predicted_peak = trace_account(step), predict(step, SETUP).peak.nbytes
        except MemoptError as error:
            yield Compared(model_type, recipe is not None, saved=real.total, left_out=f"not traced: {_said(error)}")
            return
        differences = tuple(_differences(found, real))
        yield Compared(model_type, recipe is not None, found.total, real.total, differences, predicted_peak, peak)


class _Steps:
    """Real steps of the model of a config."""

    def __init__(self, config: PreTrainedConfig) -> None:
        model = build_meta(config)
        self.config, self.sites = config, find_sites(model)
        # PyTorch traces the grouped products of experts in bf16 alone.
        precision: Precision = "bf16" if _has_experts(model) else "fp32"
        tokens = TOKENS if reads_tokens(config) else None
        self.training = Training(ROWS, tokens, precision, dropout=False, cuda_kernels=False)

    def real(self, recipe: Recipe | None) -> tuple[Account, int]:
        """The saved tensors of a forward, and the bytes at the peak of the second step."""
        torch.manual_seed(0)
        step = RealStep(Step(self.config, self.training, self.sites, recipe), SETUP)
        saved = account(step.model, step.forward, blocks=self.sites.blocks, sites=self.sites)
        step.run()
        return saved, step.live_peak()


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
