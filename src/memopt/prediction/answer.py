"""What `memopt report` says first, from the name of a model or its folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from memopt.prediction.alternatives import answer
from memopt.prediction.cards import find_card
from memopt.prediction.setup import Setup
from memopt.reporting.headline import Headline
from memopt.reporting.step import Step
from memopt.reporting.subject import record_of, step_of
from memopt.reporting.training import Request


def headline(
    request: Request,
    *,
    gpu: str | None = None,
    setup: Setup | None = None,
    step: Step | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Headline:
    """Whether a training step fits, what it needs, and what else there is; `memopt report` says it first.

    Errors are those of `memopt.report`, and:

    Args:
        request: the model and the step.
        gpu: name or size of a card: ``rtx4090``, ``24GiB``; without one only the peaks are told.
        setup: optimizer and devices, else AdamW on one device.
        step: what `request` comes to, where that is known: `Comparison.step`.
        tell: called with what is traced next.

    Raises:
        UsageError: no card is named so.
    """
    card = None if gpu is None else find_card(gpu)
    if step is None:
        if request.batch is None and request.seq is None and request.inputs is None:
            record = record_of(request.model)
            request = replace(request, inputs=None if record is None else record.batch())
        step = step_of(request)
    return answer(str(request.model), step, setup or Setup(), card, tell)
