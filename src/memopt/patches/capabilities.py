"""Methods that only some patches have, in classes that a patch inherits.

`memopt.patches.registry.having` returns the patches that inherit one of these classes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from memopt.patches.base import PlanView, RecipeView

if TYPE_CHECKING:
    from torch import nn

    from memopt.patches.checks import Check
    from memopt.verification.trial import CheckpointTrial

    #: A checkpoint that a patch measures: its stock and patched models, and a training step on a probe batch.
    Trial = CheckpointTrial
else:
    Trial = object  # of a room above this one; the name stands in annotations alone


class Levels:
    """Levels that single blocks, and settings that the head, may have beyond a recipe. No torch."""

    runs_again: bool = False
    """Whether a block at one of these levels runs its forward again; settings of `narrower` apply to such blocks."""

    def levels(self, plan: PlanView) -> Mapping[str, Mapping[str, tuple[str, ...]]]:
        """Level, in words -> block that can have it -> the names for its settings. A level saves fewer bytes than
        `plan` and than the level before it, with exact gradients and more work."""
        return {}

    def at_levels(self, chosen: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
        """Settings (KEY=VALUE) that give the names in `chosen` their levels, and no level to any other block."""
        return ()

    def narrower(self, plan: PlanView) -> Mapping[str, tuple[str, ...]]:
        """Name, in words -> settings (KEY=VALUE) with which a block that runs again has a lower peak. Gradients stay
        exact, and the work is about the same."""
        return {}

    def faster(self, plan: PlanView) -> Mapping[str, tuple[str, ...]]:
        """Name, in words -> settings (KEY=VALUE) with less work than `plan`, more saved bytes and exact gradients."""
        return {}


class EngineSettings:
    """A recipe translated to the settings of training engines. No torch."""

    def engine_settings(self, recipe: RecipeView, blocks: Sequence[str]) -> Mapping[str, str]:
        """``gradient_checkpointing`` (``some`` or ``all`` of the model's `blocks`), ``attn_implementation``."""
        return {}


@dataclass(frozen=True)
class Output:
    """Size of the tensor that one call of a module returned."""

    rows: int
    """Product of all dimensions but the last."""
    width: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.rows * self.width * self.itemsize


@dataclass(frozen=True)
class Saves:
    """Limits on the bytes that modules save for backward under a plan."""

    own: Mapping[str, int] = field(default_factory=dict)
    """Module that the patch rewrites -> upper limit of the bytes that it saves of its own results. A module without an
    entry may save as much as the stock module."""
    copies: Collection[str] = ()
    """Modules without such an entry that also save copies of their parameters."""
    recomputed: Collection[str] = ()
    """Modules inside blocks whose output is recomputed, so that no linear saves it."""
    unsaved: Collection[str] = ()
    """Modules whose output is recomputed, so that no operation saves it."""


class Checks:
    """Checks of `memopt verify` beside its comparison of outputs and gradients."""

    def saves(self, plan: PlanView, outputs: Mapping[str, Sequence[Output]]) -> Saves:
        """Limits on what the patch's modules save, given the outputs of each module in the stock model."""
        return Saves()

    def frees(self, plan: PlanView) -> Collection[str]:
        """Modules whose patched forward frees intermediate results that the stock forward saves."""
        return ()

    def checks(self, trial: Trial) -> Iterable[Check]:
        """Checks of the gradient, beside the checks of its size and error."""
        return ()

    def module_checks(self, modules: Mapping[str, nn.Module], limit: float) -> Iterable[Check]:
        """Checks of the patch's own modules among `modules`, of a model in a wide dtype. `limit` is the largest
        relative difference that rounding in that dtype explains."""
        return ()

    def farthest(self, recipe: RecipeView) -> tuple[str, ...]:
        """Settings (KEY=VALUE) that switch on every approximation of an approximate recipe."""
        return ()

    def repeatable(self, recipe: RecipeView) -> tuple[str, ...]:
        """Settings (KEY=VALUE) with which only sampled gradients draw random numbers, so that other errors repeat."""
        return ()

    def on_few_tokens(self, recipe: RecipeView) -> tuple[str, ...]:
        """Settings (KEY=VALUE) with which the method also acts on the small batch of a check."""
        return ()

    def derivative_errors(self, model: nn.Module) -> AbstractContextManager[list[float]]:
        """Inside, a list that grows by the relative error of each approximate derivative as modules of `model` run."""
        return nullcontext([])


class Section(Protocol):
    """A section that a patch adds to a report."""

    @property
    def key(self) -> str:
        """The section's field in the JSON document."""

    def lines(self) -> Iterable[str]: ...
    def to_dict(self) -> dict[str, Any]: ...


class Reports:
    """Statements of a patch about a model in reports and summaries, beside plan and bytes."""

    section: ClassVar[str | None] = None
    """The field that `report` adds to a report's JSON document."""

    def report(self, trial: Trial, *, trains_all: bool, note: Callable[[str], None]) -> Section | None:
        """The patch's section of `memopt report`; None for no section."""
        return None

    def remarks(self, model: nn.Module) -> Iterable[str]:
        """Sentences of `memopt.summary` about a patched model beside the plan, on later settings of the model say."""
        return ()
