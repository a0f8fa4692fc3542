"""Methods that only some patches have: a patch inherits the classes that it needs.

`memopt.patches.registry.having` finds the patches by such a class.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from memopt.patches.base import PlanView, RecipeView

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

    from memopt.patches.checks import Check


class Levels:
    """What single blocks and the head may have beyond a recipe. No torch."""

    runs_again: bool = False
    """Whether a block at one of these levels runs its forward again, so that :meth:`narrower` is about it."""

    def levels(self, plan: PlanView) -> Mapping[str, Mapping[str, tuple[str, ...]]]:
        """Level, in words -> block that can have it -> the names for its settings. At a level a block saves less than
        under `plan`, exactly and for more work. Each level saves less than the one before."""
        return {}

    def at_levels(self, chosen: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
        """Settings (KEY=VALUE) under which the names in `chosen` have their levels, and no other block has any."""
        return ()

    def narrower(self, plan: PlanView) -> Mapping[str, tuple[str, ...]]:
        """Exact ways in which a block that runs again needs less at once for about the same work, in words -> their
        settings (KEY=VALUE)."""
        return {}

    def faster(self, plan: PlanView) -> Mapping[str, tuple[str, ...]]:
        """Exact ways with less work than `plan` that save more bytes, in words -> their settings (KEY=VALUE)."""
        return {}


class EngineSettings:
    """A recipe in the settings of training engines. No torch."""

    def engine_settings(self, recipe: RecipeView, blocks: Sequence[str]) -> Mapping[str, str]:
        """``gradient_checkpointing`` (``some`` or ``all`` of `blocks`, the model's), ``attn_implementation``."""
        return {}


@dataclass(frozen=True)
class Output:
    """What one call of a module returned."""

    rows: int
    """Elements of all dimensions but the last."""
    width: int
    itemsize: int


@dataclass(frozen=True)
class Saves:
    """What modules save for backward under a plan."""

    own: Mapping[str, int] = field(default_factory=dict)
    """Module that the patch rewrites -> the most bytes of its own results that it saves. A module that is not named may
    save as much as the stock module."""
    recomputed: Collection[str] = ()
    """Modules inside blocks whose output no linear saves, since it is recomputed."""
    unsaved: Collection[str] = ()
    """Modules whose output nobody saves, since it is recomputed."""


class Trial(Protocol):
    """A checkpoint on which a patch measures: its models, and a training step on a probe batch."""

    @property
    def source(self) -> str | Path: ...
    @property
    def recipe(self) -> RecipeView: ...
    @property
    def probe(self) -> str:
        """What the batch is, in words; once there was a step."""

    def stock(self) -> nn.Module: ...
    def patched(self, *settings: str) -> nn.Module:
        """The patched model in fp32, with keys of its recipe changed."""

    def plan(self, model: nn.Module) -> PlanView: ...
    def step(self, model: nn.Module) -> tuple[float, dict[str, Tensor]]:
        """Loss and gradients of the probe batch, in fp32; eval mode."""


class Checks:
    """Checks of `memopt verify` beside those of outputs and gradients."""

    def saves(self, plan: PlanView, outputs: Mapping[str, Sequence[Output]]) -> Saves:
        """What its modules save, given the outputs of each module in the stock model."""
        return Saves()

    def frees(self, plan: PlanView) -> Collection[str]:
        """Modules whose forward frees intermediate results that the stock one saves."""
        return ()

    def checks(self, trial: Trial) -> Iterable[Check]:
        """Checks of the gradient, beside its size and error."""
        return ()

    def module_checks(self, modules: Mapping[str, nn.Module], limit: float) -> Iterable[Check]:
        """Checks of the patch's own modules among `modules`, those of a model in a wide dtype.

        Args:
            limit: the largest relative difference that its roundings explain.
        """
        return ()

    def farthest(self, recipe: RecipeView) -> tuple[str, ...]:
        """Settings (KEY=VALUE) under which an approximate recipe is as far off as it can be."""
        return ()

    def repeatable(self, recipe: RecipeView) -> tuple[str, ...]:
        """Settings under which two runs have the same error: no random numbers except for sampled gradients."""
        return ()

    def on_few_tokens(self, recipe: RecipeView) -> tuple[str, ...]:
        """Settings under which the method acts on a batch as small as a check's, as it does on a large one."""
        return ()

    def derivative_errors(self, model: nn.Module) -> AbstractContextManager[list[float]]:
        """Inside, the relative errors of derivatives that the patched modules of `model` make, as they run."""
        return nullcontext([])


class Section(Protocol):
    """What a patch adds to a report."""

    @property
    def key(self) -> str:
        """Its field of the JSON document."""

    def lines(self) -> Iterable[str]: ...
    def to_dict(self) -> dict[str, Any]: ...


class Reports:
    """What a report says of a model beside its plan and its bytes."""

    section: ClassVar[str | None] = None
    """The field that `report` adds to a report's JSON document."""

    def report(self, trial: Trial, *, trains_all: bool, note: Callable[[str], None]) -> Section | None:
        """What `memopt report` says beside the bytes."""
        return None

    def remarks(self, model: nn.Module) -> Iterable[str]:
        """What `memopt.summary` says of a patched model beside the plan: settings of the model since then."""
        return ()
