"""Under ZeRO-3 the loss is computed inside calls of the head, where its weights are whole: the stock loss and the stock
path, whatever the head is and wherever the loss is computed, and logits that are never whole."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, Literal
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from memopt.patches.loss import rows
from tests.distributed.engines import TOKENS, Case, batch, closing, engine
from tests.distributed.nudged import nudge
from tests.distributed.pair import Pair
from tests.distributed.test_training import MARGIN
from tests.factories import randomise_vectors_, tiny_config, tiny_inputs
from tests.support.largest import Largest

STEPS = 4
VOCABULARY = 512
#: Rows of a batch with more tokens than the head's input is wide, so that its gradient is smaller than the logits.
MANY = 16


@dataclass(frozen=True)
class HeadCase(Case):
    """How the head of a model is trained, and what its logits are read by."""

    head: Literal["trained", "frozen", "LoRA", "deep"] = "trained"
    """``deep``: the head of a masked language model, inside two modules."""
    loss: Literal["model", "cross-entropy", "likelihoods", "whole"] = "model"
    """``model``: the model's own; the others are computed from its logits, ``whole`` from all of them at once."""
    chunks: int = rows.SMALLEST_CHUNK
    """Bytes of the smallest chunk of logits."""
    rate: float = 0.05
    settings: tuple[tuple[str, Any], ...] = (("vocab_size", VOCABULARY),)

    def model(self) -> nn.Module:
        if self.head == "deep":
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                deep = transformers.BertForMaskedLM(tiny_config("bert", **dict(self.settings)))
                randomise_vectors_(deep)
            return deep.train()
        model: Any = super().model()
        if self.head == "frozen":
            model.lm_head.weight.requires_grad_(False)
        if self.head == "LoRA":
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(1)
                model = get_peft_model(model, LoraConfig(r=4, target_modules=["lm_head", "q_proj"]))
        return model


def loss_of(case: HeadCase, running: Any, inputs: dict[str, Tensor]) -> Tensor:
    labels = inputs["labels"]
    if case.head == "deep":
        labels = inputs["labels"] = labels.masked_fill(labels % 3 != 0, -100)
    outputs = running.model(**inputs)
    if case.loss == "model":
        return outputs.loss
    logits, labels = outputs.logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten()
    if case.loss == "cross-entropy":
        return F.cross_entropy(logits, labels)
    if case.loss == "likelihoods":
        return -logits.log_softmax(-1).gather(-1, labels[:, None]).mean()
    return -logits.logsumexp(0).mean()  # over the rows


def path(rank: int, case: HeadCase, how: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of a few steps, and the weights after them."""
    model = case.patched() if how == "patched" else case.model()
    if how == "nudged":
        nudge(model)
    with closing(engine(case, model)) as running, mock.patch.object(rows, "SMALLEST_CHUNK", case.chunks):
        torch.manual_seed(rank)
        losses = []
        for step in range(STEPS):
            for part in range(case.accumulation):
                loss = loss_of(case, running, batch(case, rank, step * case.accumulation + part))
                running.backward(loss, last=part == case.accumulation - 1)
                losses.append(float(loss.detach()))
            running.step()
        return losses, running.weights()


def apart(one: tuple[list[float], dict[str, Tensor]], other: tuple[list[float], dict[str, Tensor]]) -> float:
    """Largest relative difference of a loss or of a weight."""
    losses = [abs(a - b) / abs(b) for a, b in zip(one[0], other[0], strict=True)]
    assert one[1].keys() == other[1].keys()
    weights = [float((one[1][name] - w).norm() / w.norm()) for name, w in other[1].items() if w.any()]
    found = losses + weights
    return max(found) if all(map(math.isfinite, found)) else math.inf


def compared(rank: int, case: HeadCase) -> tuple[float, float]:
    """How far the patched run is from the stock one, and how far it may be."""
    found = apart(path(rank, case, "patched"), path(rank, case, "stock"))
    same = replace(case, kind="ddp", chunks=rows.SMALLEST_CHUNK)  # the engines compute the same
    # Few steps: what a loss is rounded to counts beside what rounding does to the path.
    return found, MARGIN * (_by_rounding(rank, same) + torch.finfo(torch.float32).eps)


@functools.cache
def _by_rounding(rank: int, case: HeadCase) -> float:
    return apart(path(rank, case, "nudged"), path(rank, case, "stock"))


TIED = (("vocab_size", VOCABULARY), ("tie_word_embeddings", True))
CASES = {
    "in chunks, accumulation": HeadCase("zero3", chunks=2**12, accumulation=2),
    "tied, at once": HeadCase("zero3", settings=TIED),
    "tied, in chunks": HeadCase("zero3", settings=TIED, chunks=2**12),
    "frozen": HeadCase("zero3", head="frozen", chunks=2**12),
    "LoRA": HeadCase("zero3", head="LoRA", chunks=2**12),
    "inside modules": HeadCase("zero3", head="deep", chunks=2**12),
    "a loss of the user's": HeadCase("zero3", loss="cross-entropy", chunks=2**12),
    "a loss by rows": HeadCase("zero3", loss="likelihoods", chunks=2**12),
    "logits read whole": HeadCase("zero3", loss="whole"),
}


@pytest.mark.filterwarnings("ignore:memopt. the logits of this step are computed whole")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.rotates(3)
def test_losses_and_weights_are_the_stock_ones(pair: Pair, name: str) -> None:
    for found, limit in pair.call(compared, CASES[name]):
        assert found <= limit < 1e-3


def largest(rank: int, case: HeadCase, *, patched: bool) -> int:
    """Elements of the largest tensor of a step."""
    running = engine(case, case.patched() if patched else case.model())
    with closing(running), mock.patch.object(rows, "SMALLEST_CHUNK", case.chunks):
        for step in range(2):
            inputs = tiny_inputs(case.name, MANY, TOKENS, seed=2 * step + rank)
            with Largest() as watch:
                running.backward(loss_of(case, running, inputs), last=True)
            running.step()
    return watch.elements


@pytest.mark.parametrize("name", ["tied, in chunks", "inside modules", "a loss by rows"])
@pytest.mark.rotates(3)
def test_no_tensor_of_a_step_is_as_large_as_the_logits(pair: Pair, name: str) -> None:
    case, logits = CASES[name], MANY * (TOKENS - 1) * VOCABULARY
    assert min(pair.call(largest, case, patched=False)) >= logits
    assert max(pair.call(largest, case, patched=True)) < logits


def unfetched(rank: int, case: HeadCase, *, patched: bool) -> dict[str, int]:
    """Modules whose weights ZeRO-3 was to fetch in a backward, and how often it did not."""
    with closing(engine(case, case.patched() if patched else case.model())) as running:
        running.backward(loss_of(case, running, batch(case, rank, 0)), last=True)
        counts = {n: getattr(m, "applied_pre_backward_ref_cnt", 0) for n, m in running.inner.named_modules()}
    return {name: count for name, count in counts.items() if count}


@pytest.mark.parametrize("name", ["inside modules", "a loss of the user's"])
def test_backward_fetches_for_every_module_as_in_stock(pair: Pair, name: str) -> None:
    (stock, *_), (ours, *_) = (pair.call(unfetched, CASES[name], patched=patched) for patched in (False, True))
    for found in (stock, ours):
        found.pop("lm_head", found.pop("cls.predictions.decoder", None))  # which a loss in parts calls once more
    assert ours == stock


def after_a_step(rank: int, case: HeadCase) -> str:
    with closing(engine(case, case.patched())) as running:
        outputs = running.model(**batch(case, rank, 0))
        running.backward(outputs.loss, last=True)
        running.step()
        try:
            outputs.logits.sum()
        except RuntimeError as error:
            return str(error)
    return ""


def test_logits_that_are_read_after_a_step_are_refused(pair: Pair) -> None:
    for text in pair.call(after_a_step, CASES["tied, at once"]):
        assert "were changed in place or replaced since its forward" in text
