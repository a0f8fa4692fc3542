"""Schedules of torch.distributed.pipelining: the last stage's logits stay uncomputed, and gradients are stock's."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from memopt.patches.loss.module import patch_head
from tests.distributed.pair import RANKS, Pair

WIDTH, CLASSES, ROWS, MICROBATCHES = 16, 64, 8, 4
#: Schedule -> stages on each rank.
STAGES = {"Schedule1F1B": ((0,), (1,)), "ScheduleZBVZeroBubble": ((0, 3), (1, 2))}


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)


def trained(rank: int, schedule: str, patches: bool, reads: bool) -> tuple[list[Tensor], list[str]]:
    """Gradients of this rank's stages, and warnings about whole logits."""
    torch.manual_seed(0)
    count = sum(map(len, STAGES[schedule]))
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]
    layers[-1].append(nn.Linear(WIDTH, CLASSES))
    x, labels = torch.randn(ROWS, WIDTH), torch.randint(0, CLASSES, (ROWS,))
    if patches:
        patch_head(layers[-1][-1], WIDTH, CLASSES)
    cpu = torch.device("cpu")
    stages = [PipelineStage(layers[at], at, count, cpu) for at in STAGES[schedule][rank]]
    of: Any = getattr(schedules, schedule)
    runs = of(stages if count > RANKS else stages[0], n_microbatches=MICROBATCHES, loss_fn=loss_of)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        given = (x,) if 0 in STAGES[schedule][rank] else ()
        target = labels if count - 1 in STAGES[schedule][rank] else None
        runs.step(*given, target=target, return_outputs=reads)
    gradients = [p.grad for at in STAGES[schedule][rank] for p in layers[at].parameters() if p.grad is not None]
    return gradients, [str(each.message) for each in found if "computed whole" in str(each.message)]


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("schedule", STAGES)
def test_logits_of_the_last_stage_are_computed_only_if_the_schedule_returns_them(
    pair: Pair, schedule: str, reads: bool
) -> None:
    stock = pair.call(trained, schedule, False, reads)
    ours = pair.call(trained, schedule, True, reads)
    for (expected, _), (gradients, _) in zip(stock, ours, strict=True):
        torch.testing.assert_close(gradients, expected)
    said = [text for _, texts in ours for text in texts]
    assert bool(said) is reads
    assert all("'cat' reads them" in text for text in said)
