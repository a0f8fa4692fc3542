"""Comparisons of blocks that run again in backward with blocks that run once."""

from __future__ import annotations

from torch import Tensor

from memopt.plan.recipe import Recipe, load_recipe

CHANGED = "modified by an inplace operation"


def levels(name: str) -> Recipe:
    return load_recipe("exact-levels") if name == "levels" else load_recipe("exact-unfolded", [f"checkpointing.{name}"])


def assert_same(ours: dict[str, Tensor], stock: dict[str, Tensor], limit: float = 1e-12) -> None:
    assert ours.keys() == stock.keys()
    least = 1e-6 * max(each.norm() for each in stock.values())
    for name, each in stock.items():
        assert (ours[name] - each).norm() <= limit * each.norm().clamp(min=least), name
