"""A training step of one model, ready to be traced from the model's config alone: plain data."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedConfig

from memopt.plan.recipe import Recipe
from memopt.reporting.training import Training
from memopt.walk.calls.batch import Batch
from memopt.walk.sites import Sites


@dataclass(frozen=True)
class Step:
    """How a model is patched and trained. Nothing of the model but its config is read."""

    config: PreTrainedConfig
    training: Training
    """``cuda_kernels=False`` traces the step of a CPU."""
    sites: Sites
    """What the walk found in this model (`memopt.walk.observe.walk_config`)."""
    recipe: Recipe | None = None
    """Patch with it first; None for the stock model."""
    folded: Collection[str] = frozenset()
    """Norms whose affine is folded in the checkpoint."""
    inputs: Batch | None = None
    """A batch of the size in `training`; by default one is made."""
    notes: tuple[str, ...] = ()

    @property
    def stock(self) -> Step:
        """The same step of the model without patches."""
        return replace(self, recipe=None, folded=frozenset())

    @property
    def rules(self) -> Recipe:
        """The recipe of a step that has one."""
        assert self.recipe is not None, "the stock model has no recipe"
        return self.recipe

    def trained(self, **changes: Any) -> Step:
        """The same step with other fields of `training`."""
        return replace(self, training=replace(self.training, **changes))
