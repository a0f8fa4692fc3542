"""memopt: patch Hugging Face models to fine-tune them in less memory, and prove that they stay the same.

Names are imported on first use, so `import memopt` and the command line start without torch.
"""

from __future__ import annotations

import random
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memopt.api import load, patch, plan_for, summary, unpatch
    from memopt.checkpoint.adapters.verb import convert_adapter
    from memopt.integrations.release import release_gradients
    from memopt.integrations.trainer import TrainerCallback
    from memopt.pipeline import PatchResult, UnpatchResult, fit, patch_checkpoint, report, unpatch_checkpoint
    from memopt.plan.plan import Plan, make_plan
    from memopt.plan.recipe import Recipe, load_recipe
    from memopt.verification.run import verify

    __version__: str

_HOMES = {
    **dict.fromkeys(("patch", "plan_for", "unpatch", "summary", "load"), "memopt.api"),
    **dict.fromkeys(
        ("PatchResult", "UnpatchResult", "fit", "patch_checkpoint", "report", "unpatch_checkpoint"), "memopt.pipeline"
    ),
    "convert_adapter": "memopt.checkpoint.adapters.verb",
    "verify": "memopt.verification.run",
    "TrainerCallback": "memopt.integrations.trainer",
    "release_gradients": "memopt.integrations.release",
    **dict.fromkeys(("Plan", "make_plan"), "memopt.plan.plan"),
    **dict.fromkeys(("Recipe", "load_recipe"), "memopt.plan.recipe"),
}
_ROOMS = ("plan", "verification", "reporting", "sampling", "integrations")

__all__ = [
    "PatchResult",
    "Plan",
    "Recipe",
    "TrainerCallback",
    "UnpatchResult",
    "__version__",
    "convert_adapter",
    "fit",
    "load",
    "load_recipe",
    "make_plan",
    "patch",
    "patch_checkpoint",
    "plan_for",
    "release_gradients",
    "report",
    "summary",
    "unpatch",
    "unpatch_checkpoint",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("memopt")
    elif name in _HOMES:
        state = random.getstate()  # rich draws a random number while it is imported
        value = getattr(import_module(_HOMES[name]), name)
        random.setstate(state)
    elif name in _ROOMS:
        value = import_module(f"memopt.{name}")
    else:
        raise AttributeError(f"module 'memopt' has no attribute '{name}'")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_ROOMS})
