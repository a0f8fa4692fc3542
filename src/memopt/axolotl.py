"""memopt's plugin for axolotl. In axolotl's YAML:

plugins:
  - memopt.axolotl.Plugin
memopt_recipe: exact-levels   # optional, like memopt_budget: 24GiB
"""

from __future__ import annotations

import functools
from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel
from torch import nn

from memopt.integrations.once import Patching, run_of_axolotl
from memopt.plan.recipe import DEFAULT_MEMORY_RECIPE


class Arguments(BaseModel):
    """Keys of axolotl's YAML."""

    memopt_recipe: str = DEFAULT_MEMORY_RECIPE
    """As in `memopt.patch`."""
    memopt_budget: str | int | None = None
    """As in `memopt.patch`, with axolotl's ``micro_batch_size`` and ``sequence_len``."""


class Plugin(BasePlugin):  # type: ignore[misc]
    """Patches the model after axolotl has loaded it and added adapters, and before anything wraps it."""

    def get_input_args(self) -> str:
        """Dotted path of the class that declares memopt's keys in axolotl's YAML."""
        return f"{Arguments.__module__}.{Arguments.__qualname__}"

    def post_model_load(self, cfg: Any, model: nn.Module) -> None:
        """Patch `model`; raises the errors of `memopt.patch`."""
        own = Arguments(**{key: cfg[key] for key in Arguments.model_fields if cfg.get(key) is not None})
        patching = Patching(own.memopt_recipe, budget=own.memopt_budget)
        run = functools.partial(run_of_axolotl, cfg)
        patching.patch_once(model, batch=cfg.get("micro_batch_size"), seq=cfg.get("sequence_len"), run=run)
