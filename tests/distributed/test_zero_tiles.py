"""Tiles of tokens under ZeRO-3, which gathers the weights of a module once for all its tiles.

Published bugs of other tiled MLPs are cases: gradients of adapters that are not reduced (ArcticTraining#334), a
parameter that is reduced once a tile, and ranks that wait for others with more tokens (kernels-community#1000).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import memopt
from memopt.patches.tile import module as tiles
from tests.distributed import engines
from tests.distributed.engines import TOKENS, Case, Trajectory, batch, closing, engine, trained
from tests.distributed.nudged import nudge
from tests.distributed.pair import Pair
from tests.distributed.test_training import MARGIN

STEPS = 6
TILES = ("checkpointing.method=full", "tiles.method=tokens", "tiles.tokens=5")


@dataclass(frozen=True)
class TileCase(Case):
    overrides: tuple[str, ...] = TILES
    rate: float = 0.05
    lengths: tuple[int, int] = (TOKENS, TOKENS)
    """Tokens of a row in each rank."""

    def batch(self, rank: int, number: int) -> dict[str, Tensor]:
        return {name: each[:, : self.lengths[rank]] for name, each in batch(self, rank, number).items()}


CASES = {
    "full": TileCase("zero3"),
    "one rank has a tile only": TileCase("zero3", lengths=(TOKENS, 2)),
    "accumulation": TileCase("zero3", accumulation=2),
    "LoRA": TileCase("zero3", lora_dropout=0.0),
    "mixture": TileCase("zero3", "mixtral"),
}


def run(rank: int, case: TileCase, how: str) -> tuple[Trajectory, int, int]:
    """Where a run goes, how many backwards ran by tiles, and how many modules inside of tiled ones have hooks."""
    backwards: list[Any] = []
    by_tiles = tiles._gradients
    model = case.patched() if how == "patched" else case.model()
    if how == "nudged":
        nudge(model)
    with (
        closing(engine(case, model)) as running,
        mock.patch.object(tiles, "_gradients", lambda *given: backwards.append(1) or by_tiles(*given)),
        mock.patch.object(engines, "batch", TileCase.batch),
    ):
        found = trained(case, running, rank, STEPS)
        tiled = [each for each in model.modules() if vars(each).get("_z3_leaf")]
        hooked = [each for parent in tiled for each in parent.modules() if each is not parent and each._forward_hooks]
    return found, len(backwards), len(hooked)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.rotates(3)
def test_weights_are_those_of_the_stock_model_and_gathered_for_all_tiles_at_once(pair: Pair, name: str) -> None:
    case = CASES[name]
    stock = pair.call(run, replace(case, checkpointing=True), "stock")
    # The engines compute the same, and DDP starts faster: how far rounding alone drives such runs apart.
    rounded, exact = (pair.call(run, replace(case, kind="ddp"), how) for how in ("nudged", "stock"))
    for rank, (found, backwards, hooked) in enumerate(pair.call(run, case, "patched")):
        limit = MARGIN * (rounded[rank][0].distance(exact[rank][0]) + torch.finfo(torch.float32).eps)
        assert found.distance(stock[rank][0]) <= limit < 1e-3
        assert backwards == (2 * STEPS * case.accumulation if case.lengths[rank] == TOKENS else 0)  # 2 blocks
        assert hooked == 0


def refusals(rank: int, case: Case) -> str:
    model = case.model()
    with closing(engine(case, model)):
        memopt.patch(model, memopt.load_recipe("exact-unfolded", case.overrides))
        return str(memopt.summary(model))


def test_a_model_that_has_hooks_already_is_left_whole_with_the_reason(pair: Pair) -> None:
    for text in pair.call(refusals, CASES["full"]):
        assert "patch before deepspeed.initialize" in text
