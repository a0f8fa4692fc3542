"""`Trainer(callbacks=[MemoptCallback()])` for Lightning."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from torch import nn
from transformers import PreTrainedModel

from memopt.api import summary
from memopt.errors import NegativeVerdict
from memopt.integrations.once import Patching
from memopt.patches.apply import is_patched
from memopt.patches.record import warn_once
from memopt.plan.recipe import DEFAULT_MEMORY_RECIPE, Recipe


class MemoptCallback(Callback):  # type: ignore[misc]
    """Patches the Hugging Face and PEFT models inside a LightningModule before the strategy wraps them.

    Models built in `configure_model` are patched when fitting starts. If the strategy shards models (FSDP, DeepSpeed),
    call `memopt.patch` in `configure_model`. Without a Hugging Face model the whole module is patched, or its children
    if it has no forward. Raises the errors of `memopt.patch`.
    """

    def __init__(
        self,
        recipe: str | Path | Recipe = DEFAULT_MEMORY_RECIPE,
        *,
        inputs: Mapping[str, Any] | str | Path | None = None,
        budget: str | int | None = None,
        batch: int | None = None,
        seq: int | None = None,
    ) -> None:
        """The arguments are those of `memopt.patch`."""
        self._patching = Patching(recipe, inputs, budget, batch, seq)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        for model in _models(pl_module):
            self._patching.patch_once(model, say=trainer.is_global_zero)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        models, nothing = _models(pl_module) or _networks(pl_module), []
        for model in models:
            if not is_patched(model):
                try:
                    self._patching.patch_once(model, say=trainer.is_global_zero)
                except NegativeVerdict as error:  # a small part beside the network
                    nothing.append(error)
                    continue
            if trainer.is_global_zero:
                warn_once(model, summary(model).remarks)
        if len(nothing) == len(models):
            raise nothing[0]


def _models(module: nn.Module) -> list[nn.Module]:
    """The outermost models of transformers, PEFT and diffusers inside `module`."""
    is_model = isinstance(module, PreTrainedModel) or hasattr(module, "peft_config")
    if is_model or any(base.__module__.startswith("diffusers.") for base in type(module).__mro__):
        return [module]
    return [model for child in module.children() for model in _models(child)]


def _networks(module: LightningModule) -> list[nn.Module]:
    """`module`, or if it has no forward, and so is never called, the children of several layers."""
    found = [each for each in module.children() if any(True for _ in each.children())]
    return [module] if type(module).forward is not LightningModule.forward else found or [module]
