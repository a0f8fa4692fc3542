"""Plans whose files tests load, in the environment of each engine, and those of configs/training.

python -m tests.emit.plans      write configs/training
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memopt.emit import KINDS, Planned, files_of, planned_step
from memopt.plan.recipe import load_recipe
from memopt.prediction.planner.choice import Choice, Plan
from memopt.prediction.setup import Setup
from memopt.trace.training import Training

BLOCKS = ("model.layers.0", "model.layers.1")


SHIPPED = Path(__file__).parents[2] / "configs" / "training"
_FOUR = {"devices": 4}


def planned(
    *overrides: str,
    setup: dict[str, Any] | None = None,
    model: str = "some/model",
    recipe: str = "plan/recipe.yaml",
    **step: Any,
) -> Planned:
    """Micro-batches of 2 x 128 tokens, 4 in a step, by a recipe with `overrides`."""
    plan = Plan(load_recipe("exact-unfolded", overrides), "2 blocks", 2, 4, 1 << 30, 0.5, 0.25)
    training, around = Training(**{"batch": 8, "seq": 128, **step}), Setup(**setup or {})
    choice = Choice(model, "in words", "A100", 1 << 31, plan, step=training, setup=around, blocks=BLOCKS)
    return planned_step(model, recipe, choice)


def text_of(plan: Planned, kind: str) -> str:
    """The one file of an engine, beside the recipe."""
    files, _ = files_of(plan, [kind])
    (name,) = files.keys() - {"recipe.yaml"}
    return files[name].decode()


def shipped_text(kind: str) -> str:
    """What the file of configs/training says: a common training of a model of one billion parameters."""
    ways: dict[str, dict[str, Any]] = {
        "accelerate": {"setup": {"sharding": "ddp", **_FOUR}},
        "fsdp": {"setup": {"sharding": "fsdp", **_FOUR}},
        "torchtitan": {"setup": {"sharding": "fsdp", **_FOUR}},
        "deepspeed": {"setup": {"sharding": "zero2", **_FOUR}},
        "axolotl": {"train": "lora"},
    }
    options = {"model": "meta-llama/Llama-3.2-1B", "recipe": "exact-unfolded", "seq": 2048, **ways.get(kind, {})}
    return text_of(planned(**options), kind)


if __name__ == "__main__":
    SHIPPED.mkdir(exist_ok=True)
    for name, kind in KINDS.items():
        (SHIPPED / kind.file).write_text(shipped_text(name))
