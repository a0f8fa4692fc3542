"""The levels that a model's blocks can have beyond a recipe, expressed as settings of that recipe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from memopt.patches import capabilities
from memopt.patches.registry import having
from memopt.plan.plan import make_plan
from memopt.plan.recipe import Recipe, load_recipe
from memopt.walk.sites import Sites


@dataclass(frozen=True)
class Level:
    """A level that a block may have beyond the recipe."""

    words: str
    patch: capabilities.Levels
    names: Mapping[str, tuple[str, ...]]
    """Block that can have it -> the names that its setting takes."""


@dataclass(frozen=True)
class Levels:
    """The levels of each block, from the fastest to the smallest. Level 0 is the recipe's own."""

    recipe: Recipe
    blocks: tuple[str, ...]
    """Names of the blocks, in the order of their forward."""
    beyond: tuple[Level, ...] = ()
    heads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Levels of the head and the loss beyond the recipe: words -> settings."""
    narrower: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Settings with which a block that runs again in backward needs less memory while it runs: words -> settings."""
    narrows: bool = False
    """Whether `narrower` is used where a block runs again."""

    @property
    def options(self) -> tuple[tuple[int, ...], ...]:
        """The levels that each block can have; the last entry has the levels of the head."""
        of_blocks = ((0, *(n for n, level in enumerate(self.beyond, 1) if b in level.names)) for b in self.blocks)
        return (*of_blocks, tuple(range(len(self.heads) + 1)))

    def recipe_at(self, chosen: Sequence[int], name: str = "") -> Recipe:
        """The recipe that gives block i level ``chosen[i]``, and the head the last level of `chosen`."""
        settings: list[str] = []
        for patch in dict.fromkeys(level.patch for level in self.beyond):
            names: dict[str, list[str]] = {}
            for number, level in enumerate(self.beyond, 1):
                having = [block for block, its in zip(self.blocks, chosen, strict=False) if its == number]
                if level.patch is patch:
                    names[level.words] = [each for block in having for each in level.names[block]]
            settings += patch.at_levels(names)
        settings += list(self.heads.values())[chosen[-1] - 1] if chosen[-1] else ()
        settings += sum(self._narrower(chosen).values(), ())
        described = {"name": name or self.recipe.name, "description": self.words(chosen)}
        return load_recipe(self.recipe, settings).model_copy(update=described)

    def counts(self, chosen: Sequence[int]) -> dict[str, int]:
        """Level in words -> number of blocks at this level; levels without blocks are left out."""
        found = Counter(chosen[:-1])
        words = (f"as in '{self.recipe.name}'", *(level.words for level in self.beyond))
        return {its: found[number] for number, its in enumerate(words) if found[number]}

    def words(self, chosen: Sequence[int]) -> str:
        """The levels in words: ``12 blocks as in 'exact-unfolded', 4 checkpointed``."""
        (words, count), *others = self.counts(chosen).items()
        text = ", ".join([f"{count} block{'s' * (count > 1)} {words}", *(f"{n} {its}" for its, n in others)])
        head = list(self.heads)[chosen[-1] - 1] if chosen[-1] else ""
        return "; ".join(filter(None, (text, head, ", ".join(self._narrower(chosen)))))

    def _narrower(self, chosen: Sequence[int]) -> Mapping[str, tuple[str, ...]]:
        levels = (self.beyond[number - 1] for number in chosen[:-1] if number)
        return self.narrower if self.narrows and any(level.patch.runs_again for level in levels) else {}


def levels_of(sites: Sites, recipe: Recipe) -> Levels:
    """Every level that the patches offer for a model with these sites."""
    plan = make_plan(sites, recipe)
    beyond = (Level(words, p, names) for p in having(capabilities.Levels) for words, names in p.levels(plan).items())
    heads = {words: settings for patch in having(capabilities.Levels) for words, settings in patch.faster(plan).items()}
    narrower = {
        words: settings for patch in having(capabilities.Levels) for words, settings in patch.narrower(plan).items()
    }
    return Levels(recipe, sites.blocks, tuple(level for level in beyond if level.names), heads, narrower)
