"""Patch the model of a trainer, unless it is already patched, and read settings that decide its memory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from memopt.api import check_is_module, memory_recipe, patch, summary
from memopt.errors import UsageError
from memopt.plan.recipe import DEFAULT_MEMORY_RECIPE, Recipe
from memopt.prediction.cards import find_card
from memopt.prediction.setup import TRAINER_NAMES, Run, Setup, Sharding

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
        """Raises a RecipeError if the recipe is unknown, or folds weights, and a UsageError if the budget is no size or
        card."""
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
        """Patch `model` and, where this process is to `say` it, log it; a model that is already patched is not changed.
        The trainer's sizes `batch` and `seq` are for `budget`, where this object has none; `run`, which is called for a
        `budget`, gives how the trainer runs its steps."""
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


_OPTIMIZERS = {name: optimizer for optimizer, name in TRAINER_NAMES.items()}
_ZERO: dict[int, Sharding] = {1: "zero1", 2: "zero2", 3: "zero3"}


def run_of(args: Any) -> Run:
    """How a Trainer with these `TrainingArguments` runs its steps; logs a warning about what a plan cannot express."""
    setup, left_out = _optimized(str(getattr(args.optim, "value", args.optim)), args.gradient_accumulation_steps)
    if args.world_size > 1:
        stage = getattr(getattr(args, "deepspeed_plugin", None), "zero_stage", 0)
        sharding: Sharding = _ZERO.get(stage) or ("fsdp" if getattr(args, "fsdp", None) else "ddp")
        setup = _sharded(setup, sharding, args.world_size, left_out)
    elif args.n_gpu > 1:
        left_out.append(f"DataParallel over {args.n_gpu} devices")
    return _run(setup, args.bf16, args.fp16, args.gradient_checkpointing, left_out)


def run_of_axolotl(cfg: Any) -> Run:
    """How axolotl runs the steps of this configuration; logs a warning about what a plan does not count."""
    optimizer = str(cfg.get("optimizer") or "adamw_torch_fused")
    setup, left_out = _optimized(optimizer, int(cfg.get("gradient_accumulation_steps") or 1))
    sharded = [key for key in ("deepspeed", "fsdp", "fsdp_config") if cfg.get(key)]
    left_out += sharded
    devices = int(cfg.get("world_size") or 1)
    if devices > 1 and not sharded:
        setup = _sharded(setup, "ddp", devices, left_out)
    return _run(setup, cfg.get("bf16"), cfg.get("fp16"), cfg.get("gradient_checkpointing"), left_out)


def _optimized(name: str, accumulation: int) -> tuple[Setup, list[str]]:
    """The setup with the optimizer that Trainer calls `name`, and what is left out of it."""
    if name in _OPTIMIZERS:
        return Setup(_OPTIMIZERS[name], accumulation=accumulation), []
    return Setup(accumulation=accumulation), [f"optimizer {name}"]


def _sharded(setup: Setup, sharding: Sharding, devices: int, left_out: list[str]) -> Setup:
    try:
        return replace(setup, sharding=sharding, devices=devices)
    except UsageError:  # not predicted with this optimizer
        left_out.append(f"{sharding} over {devices} devices")
        return setup


def _run(setup: Setup, bf16: object, fp16: object, checkpointing: object, left_out: list[str]) -> Run:
    if left_out:
        logger.warning("the plan for the budget does not count %s; it is for %s", " and ".join(left_out), setup)
    return Run(setup, "bf16" if bf16 else "fp16" if fp16 else None, bool(checkpointing))
