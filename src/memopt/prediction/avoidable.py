"""Tensors at the peak that another setting avoids: masks of dropouts, and tokens x tokens of eager attention."""

from __future__ import annotations

from collections.abc import Iterator

from memopt.prediction.headline import gib
from memopt.prediction.peak import Prediction
from memopt.trace.events import Storage
from memopt.trace.training import Step
from memopt.walk.models.attention import FLASH, FUSED
from memopt.walk.models.config import model_class

#: Share of the peak above which a kind of tensors gets a remedy of its own.
MATTERS = 0.02


def is_mask(storage: Storage) -> bool:
    """Whether `storage` is the mask of a dropout."""
    return storage.operation in ("native_dropout", "bernoulli_", "bernoulli") and storage.dtype in ("bool", "uint8")


def attention_remedy(found: Prediction, step: Step) -> Iterator[str]:
    """Advice on another attention implementation, if tensors of tokens x tokens exceed a share of the peak."""
    seq = step.training.seq
    if any(seq in each.shape for each in found.resident):
        return  # a width of the model: tensors of tokens x width have the same shape
    square = sum(each.nbytes for each in found.peak.alive if seq and each.shape[-2:] == (seq, seq))
    if square <= MATTERS * found.peak.nbytes:
        return
    supported = model_class(step.config)
    ways = [name for name, flag in FUSED.items() if name not in FLASH[1:] and getattr(supported, flag, False)]
    which = " or ".join(f"'{name}'" for name in ways)
    with_it = f"attn_implementation={which} makes none (--attention counts it)"
    advice = with_it if ways else "this model has no attention without them"
    yield f"{gib(square)} at the peak are tensors of tokens x tokens of eager attention: {advice}"
