"""MLPs, experts and other modules that map each token on its own, run by tiles of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from pydantic import Field

from memopt.patches.base import EXCLUDED, LEFT, Live, Patch, PlanView, RecipeView, Rows, Rules
from memopt.patches.capabilities import Checks, Levels
from memopt.patches.tile.site import TileSite
from memopt.walk.sites import Sites

#: Tokens of a tile in checks, whose batches are small.
_FEW = 8


class TileRules(Rules):
    """Whether modules that map each token on its own run by tiles of tokens."""

    key = "tiles"
    needs = (("room", "tokens", (0,)),)

    method: Literal["none", "tokens"] = "none"
    """``tokens``: by tiles if the module's block is checkpointed, by this recipe or by the model's own switch."""
    room: int = Field(default=256, ge=1)
    """MiB that a tile takes, about; without `tokens`, a tile has at least 256 tokens."""
    tokens: int = Field(default=0, ge=0)
    """Tokens of a tile; 0: as many as there is room for."""


class TilePatch(Patch, Levels, Checks):
    """Modules by tiles: temporary memory of a block does not grow with intermediate size times number of tokens."""

    name = "tile"
    after = ("checkpointing", "gated_mlp", "linear", "replayed_function", "softmax", "sampled_linear")
    rows = Rows("tile", {"tiles": "by tiles"}, noun="module of tokens", plural="modules of tokens")
    rules = TileRules

    def propose(self, sites: Sites) -> Iterator[tuple[str, TileSite]]:
        return ((site.name, site) for site in sites.of(TileSite))

    def decide(self, site: TileSite, plan: PlanView) -> tuple[str, str] | None:
        if plan.recipe.rules(TileRules).is_off:
            return None
        if not plan.recipe.selects(site.name):
            return LEFT, EXCLUDED
        return "tiles", "maps each token on its own: runs by tiles of tokens where its block is checkpointed"

    def narrower(self, plan: PlanView) -> Mapping[str, tuple[str, ...]]:
        is_off = plan.recipe.rules(TileRules).is_off
        return {"modules by tiles of tokens": (f"{TileRules.key}.method=tokens",)} if is_off else {}

    def notes(self, plan: PlanView) -> Iterator[str]:
        if not plan.recipe.rules(TileRules).is_off and plan.sites.blocks and not plan.chosen(self.name):
            yield f"Recipe '{plan.recipe.name}' runs modules by tiles, and no block of this model has one that could."

    def apply(self, live: Live) -> None:
        from memopt.patches.tile.module import patch_tiles

        rules = live.plan.recipe.rules(TileRules)
        for site in live.plan.chosen(self.name):
            live.attempt(self.name, site.name, patch_tiles, site.numbers, rules.room << 20, rules.tokens)

    def on_few_tokens(self, recipe: RecipeView) -> tuple[str, ...]:
        return () if recipe.rules(TileRules).is_off else (f"{TileRules.key}.tokens={_FEW}",)


PATCH = TilePatch()
