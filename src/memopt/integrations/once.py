"""Patch the model of a trainer, unless it is already patched."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from memopt.api import check_is_module, memory_recipe, patch, summary
from memopt.plan.recipe import DEFAULT_MEMORY_RECIPE, Recipe
from memopt.prediction.cards import find_card
from memopt.prediction.setup import Run

logger = logging.getLogger("memopt")


@dataclass(frozen=True)
class Patching:
    """The arguments of `memopt.patch`, kept for a model that is built later."""

    recipe: str | Path | Recipe = DEFAULT_MEMORY_RECIPE
    inputs: Mapping[str, Any] | str | Path | None = None
    budget: str | int | None = None
    batch: int | None = None
    seq: int | None = None

    def __post_init__(self) -> None:
        """
        Raises:
            RecipeError: the recipe is unknown, or folds weights.
            UsageError: the budget is neither a size nor a card.
        """
        memory_recipe(self.recipe)
        if isinstance(self.budget, str):
            find_card(self.budget)

    def patch_once(
        self,
        model: nn.Module,
        *,
        batch: int | None = None,
        seq: int | None = None,
        run: Callable[[], Run] | None = None,
        say: bool = True,
    ) -> None:
        """Patch `model` and log it; a model that is already patched is not changed.

        Args:
            batch, seq: the trainer's sizes, for `budget`, where this object has none.
            run: gives how the trainer runs its steps; called for a `budget`.
            say: whether this process logs.
        """
        check_is_module(model)
        before = summary(model)
        with contextlib.nullcontext() if say else _silent():
            if before.modules:
                logger.info("the model is already patched by recipe '%s'; it was not changed", before.recipe)
                return
            sizes = {"batch": self.batch or batch, "seq": self.seq or seq}
            of = None if run is None or self.budget is None else run()
            patch(model, self.recipe, inputs=self.inputs, budget=self.budget, run=of, **sizes)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)
