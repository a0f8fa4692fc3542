"""Activation checkpointing of chosen blocks: each saves only its input and runs again in backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from memopt.patches.base import (
    LEFT,
    OFF,
    Live,
    Patch,
    Patterns,
    PlanView,
    RecipeView,
    Rows,
    Rules,
    any_matches,
    one_or_more,
)
from memopt.patches.capabilities import Checks, EngineSettings, Levels, Reports
from memopt.walk.sites import Sites

if TYPE_CHECKING:
    from torch import nn

#: MiB for attention's backward by groups of heads, in the setting that :meth:`CheckpointingPatch.narrower` offers.
_ROOM = 256
KEPT, RUN_AGAIN, OFFLOADED = "recompute block, keep attention", "recompute block", "recompute block, offload input"
BOTH = "recompute block, keep attention, offload both"


class CheckpointingRules(Rules):
    """The blocks that are checkpointed, and how."""

    key = "checkpointing"
    needs = (("n", "method", ("every-n",)), ("count", "method", ("count",)))

    method: Literal["none", "full", "every-n", "count"] = "none"
    """``full``: every block; ``every-n``: the first of each `n`; ``count``: the first `count`. The first blocks run
    again last in backward, when saved tensors of later blocks are freed, and so below the peak."""
    n: int = Field(default=2, ge=1)
    count: int | None = Field(default=None, ge=0)
    blocks: Annotated[Literal["auto"] | tuple[str, ...], one_or_more("auto")] = "auto"
    """Names (shell wildcards) of the blocks that are counted; ``auto``: all."""
    offload: Annotated[Literal["none", "input"] | tuple[str, ...], one_or_more(OFF, "input")] = "none"
    """``input``: inputs of checkpointed blocks are kept in CPU memory, pinned for an accelerator; or names (shell
    wildcards) of the checkpointed blocks whose input is kept there."""
    keep: Annotated[Literal["none", "attention"] | tuple[str, ...], one_or_more(OFF, "attention")] = "none"
    """``attention``: checkpointed blocks keep the output of their attention, in the same memory as their input, and do
    not compute it again; or names (shell wildcards) of the checkpointed blocks that do so."""
    attention_room: float = Field(default=0.0, ge=0.0)
    """MiB that the backward of fused attention, by groups of heads, takes beside its gradients, about; 0: all heads
    run at once."""

    @model_validator(mode="after")
    def _has_a_count(self) -> CheckpointingRules:
        if self.method == "count" and self.count is None:
            raise ValueError("'count' needs the number of blocks, e.g. checkpointing.count=4")
        return self

    def patterns(self, sites: Sites) -> Iterator[Patterns]:
        for name in () if self.is_off else ("blocks", "offload", "keep"):
            yield Patterns(f"{self.key}.{name}", getattr(self, name), sites.blocks, "block")


class CheckpointingPatch(Patch, Levels, EngineSettings, Reports, Checks):
    """Checkpointed blocks; other patches work inside the checkpointed region."""

    name = "checkpointing"
    after = ("loss", "linear", "compression")  # a block that another patch has rewritten is not checkpointed
    rows = Rows(
        "checkpointing",
        {
            KEPT: "checkpointed but for attention",
            RUN_AGAIN: "checkpointed",
            BOTH: "checkpointed but for attention, both offloaded",
            OFFLOADED: "checkpointed with offloaded input",
        },
        noun="block",
        plural="blocks",
        are_selected=False,  # the rules' `blocks` selects them
        sites="blocks",
    )
    rules = CheckpointingRules
    runs_again = True

    def decide(self, site: str, plan: PlanView) -> tuple[str, str] | None:
        rules = plan.recipe.rules(CheckpointingRules)
        if rules.is_off:
            return None
        if reason := dict(plan.sites.run_once).get(site):
            return LEFT, reason
        counted = [block for block in _eligible(plan) if _is_counted(block, rules)]
        if site not in counted:
            return LEFT, "not among the recipe's checkpointing.blocks"
        place = counted.index(site)
        if rules.method == "every-n" and place % rules.n:
            return LEFT, f"not checkpointed: one in {rules.n} is"
        if rules.method == "count" and place >= (rules.count or 0):
            return LEFT, f"not checkpointed: the first {rules.count} are"
        keeps = _is_among(site, rules.keep)
        if _is_among(site, rules.offload):
            if keeps:
                return (
                    BOTH,
                    "all but attention runs again in backward; its input and attention's output wait in CPU memory",
                )
            return OFFLOADED, "runs again in backward; its input waits in CPU memory"
        if keeps:
            return KEPT, "saves only its input and its attention's output; all but attention runs again in backward"
        return RUN_AGAIN, "saves only its input and runs again in backward"

    def notes(self, plan: PlanView) -> Iterator[str]:
        if not plan.recipe.rules(CheckpointingRules).is_off and not plan.sites.blocks:
            yield f"Recipe '{plan.recipe.name}' checkpoints blocks, and this model has none."

    def levels(self, plan: PlanView) -> Mapping[str, Mapping[str, tuple[str, ...]]]:
        blocks = {block: (block,) for block in _eligible(plan)}
        return dict.fromkeys(self.rows.actions.values(), blocks)

    def at_levels(self, chosen: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
        key = CheckpointingRules.key
        kept, there, both, elsewhere = (chosen.get(level, ()) for level in self.rows.actions.values())
        if not (blocks := (*kept, *there, *both, *elsewhere)):
            return (f"{key}.method={OFF}",)

        def which(names: Sequence[str], every: str) -> str:
            return every if len(names) == len(blocks) else f"[{','.join(names)}]" if names else OFF

        settings = {"blocks": f"[{','.join(blocks)}]", "offload": which((*both, *elsewhere), "input")}
        settings |= {"keep": which((*kept, *both), "attention")}
        return (f"{key}.method=full", *(f"{key}.{field}={value}" for field, value in settings.items()))

    def narrower(self, plan: PlanView) -> Mapping[str, tuple[str, ...]]:
        rules = plan.recipe.rules(CheckpointingRules)
        if rules.attention_room:
            return {}
        return {"attention by groups of heads": (f"{rules.key}.attention_room={_ROOM}",)}

    def engine_settings(self, recipe: RecipeView, blocks: Sequence[str]) -> Mapping[str, str]:
        rules = recipe.rules(CheckpointingRules)
        if rules.is_off:
            return {}
        whole = rules.method == "full" and rules.offload == OFF and all(_is_counted(block, rules) for block in blocks)
        return {"gradient_checkpointing": "all" if whole else "some"}

    def apply(self, live: Live) -> None:
        if live.plan.recipe.rules(CheckpointingRules).is_off:
            return
        from memopt.patches.checkpointing.module import has_switch, patch_block
        from memopt.patches.checkpointing.offload import InputsOfThreads

        chosen = set(live.plan.chosen(self.name))
        offloaded = {*live.plan.chosen(self.name, OFFLOADED), *live.plan.chosen(self.name, BOTH)}
        inputs = InputsOfThreads(of_some_blocks=len(offloaded) < len(live.plan.sites.blocks))
        rules = live.plan.recipe.rules(CheckpointingRules)
        for block in _eligible(live.plan):
            # The other blocks are patched too, because transformers' switch sets all blocks of a model.
            if block in chosen or has_switch(live.modules[block]):
                waits = inputs if block in offloaded else None
                again = block in chosen
                keeps, room = again and _is_among(block, rules.keep), round(rules.attention_room * (1 << 20))
                live.attempt(self.name, block, patch_block, live.scopes.get(block), again, waits, keeps, room)

    def on_few_tokens(self, recipe: RecipeView) -> tuple[str, ...]:
        rules = recipe.rules(CheckpointingRules)
        return (f"{rules.key}.attention_room=0.001",) if rules.attention_room and not rules.is_off else ()

    def remarks(self, model: nn.Module) -> Iterator[str]:
        from memopt.patches.checkpointing.module import overruled, switched_on

        if count := overruled(model):
            yield (
                f"activation checkpointing was also switched on for the model: the recipe's choice of blocks holds, "
                f"for {count} of them against it; memopt.unpatch(model) takes it back"
            )
        elif count := switched_on(model):
            yield (
                f"activation checkpointing of {count} modules, switched on for the model, runs around memopt, so a "
                "block keeps its input alone: what memopt saves is in the one block that runs again and in the loss. "
                "Without checkpointing it saves in every block and nothing runs again "
                "(model.gradient_checkpointing_disable()); `memopt report` compares them"
            )


def _is_among(block: str, names: str | tuple[str, ...]) -> bool:
    """Whether a field of the rules includes `block`, by a word for all blocks or by patterns."""
    return any_matches(block, names) if isinstance(names, tuple) else names != OFF


def _eligible(plan: PlanView) -> list[str]:
    once = dict(plan.sites.run_once)
    return [block for block in plan.sites.blocks if block not in once]


def _is_counted(block: str, rules: CheckpointingRules) -> bool:
    return not isinstance(rules.blocks, tuple) or any_matches(block, rules.blocks)


PATCH = CheckpointingPatch()
