"""What a patched model saves for backward under each engine is what it saves on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt.patches.swap import is_swapped
from memopt.trace.account import live_bytes
from tests.distributed.engines import ROWS, TOKENS, Case, Engine, Kind, batch, closing, engine, trained
from tests.distributed.pair import Pair
from tests.factories import HIDDEN_SIZE

#: Logits of 67 columns are smaller than the gradient that a loss in parts computes in advance.
WHOLE_LOGITS = ("loss.method=none",)
LAST_HIDDEN_STATE = ROWS * TOKENS * HIDDEN_SIZE * 4


def saved(rank: int, case: Case, *, patched: bool) -> int:
    """Bytes of activations that one forward leaves behind, in the third step of a run."""
    with closing(engine(case, case.patched() if patched else case.model())) as running:
        for step in range(2):
            running.backward(running.forward(batch(case, rank, step)), last=True)
            running.step()
        return live_bytes(lambda: running.forward(batch(case, rank, 2)))


def spared(rank: int, case: Case) -> tuple[int, int]:
    """Bytes that the patch spares, under the engine and without one."""
    under = saved(rank, case, patched=False) - saved(rank, case, patched=True)
    alone = [live_bytes(_second_forward(model, case, rank)) for model in (case.model(), case.patched())]
    return under, alone[0] - alone[1]


def _second_forward(model: nn.Module, case: Case, rank: int) -> Callable[[], Any]:
    model(**batch(case, rank, 0)).loss.backward()
    return lambda: model(**batch(case, rank, 2)).loss


@pytest.mark.parametrize("lora_dropout", [None, 0.0], ids=["full", "LoRA"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "zero2", "zero3"])
@pytest.mark.rotates(3)
def test_as_many_bytes_are_spared_as_on_one_device(pair: Pair, kind: Kind, lora_dropout: float | None) -> None:
    case = Case(kind, lora_dropout=lora_dropout, overrides=WHOLE_LOGITS)
    for under, alone in pair.call(spared, case):
        assert alone > 80_000
        # The head finds no spec behind ZeRO-3's functions around each module, and stands in no scope.
        assert under == alone - (LAST_HIDDEN_STATE if kind == "zero3" else 0)


def losses_in_parts(rank: int, kind: Kind) -> bool:
    """Whether logits are never whole under this engine."""
    case = Case(kind)
    with closing(engine(case, case.patched())) as running:
        return getattr(running.model(**batch(case, rank, 0)).logits, "value", running) is None


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "zero2", "zero3"])
def test_logits_are_never_whole(pair: Pair, kind: Kind) -> None:
    assert pair.call(losses_in_parts, kind) == [True, True]


def refusal(rank: int, kind: Kind) -> str:
    case = Case(kind)
    running: Engine
    with closing(engine(case, case.model())) as running:
        try:
            memopt.patch(running.model)
        except memopt.errors.MemoptError as error:
            return str(error)
    return ""


def patched_late(rank: int, kind: Kind) -> None:
    """Patch the model inside an engine that has taken it already: the same modules, steps and bytes as before it."""
    case, found = Case(kind), []
    for late in (False, True):
        with closing(engine(case, case.model() if late else case.patched())) as running:
            if late:
                memopt.patch(running.model.module, "exact-unfolded")
            modules = [name for name, module in running.inner.named_modules() if is_swapped(module)]
            steps = trained(case, running, rank, 3)
            found.append((modules, steps, live_bytes(lambda: running.forward(batch(case, rank, 3)))))
    (modules, steps, nbytes), late_run = found
    assert (modules, nbytes) == (late_run[0], late_run[2])
    assert steps.distance(late_run[1]) == 0


@pytest.mark.parametrize("kind", ["zero2", "zero3"])
def test_the_model_inside_deepspeed_s_engine_may_be_patched_late(pair: Pair, kind: Kind) -> None:
    pair.call(patched_late, kind)


@pytest.mark.parametrize("kind", ["fsdp2", "zero2", "zero3"])
def test_what_is_sharded_already_is_refused_with_the_remedy(pair: Pair, kind: Kind) -> None:
    for text in pair.call(refusal, kind):
        assert "Patch the model before" in text


def masks(rank: int, overrides: tuple[str, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of one batch that all ranks have, in two steps, with a generator of each rank's own."""
    case = Case("ddp", lora_dropout=0.5, overrides=overrides)
    torch.manual_seed(rank)
    with closing(engine(case, case.patched())) as running:
        first, second = (running.forward(batch(case, 0, 0)).detach() for _ in range(2))
    return first, second


@pytest.mark.parametrize("method", ["none", "seed"])
def test_ranks_and_steps_draw_masks_of_their_own(pair: Pair, method: str) -> None:
    losses = [loss for each in pair.call(masks, (f"dropouts.method={method}",)) for loss in each]
    assert len({float(loss) for loss in losses}) == 4
