"""The ways to train that `benchmarks.finetune` compares: what each does to a stock model, and where it cannot run.

A way is a name below or that of a recipe of memopt. It is prepared in a process of its own, since Liger replaces
classes of transformers and compilers have settings of the whole process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import memopt
from benchmarks.finetune_task import CannotRun, move_by_one_ulp
from benchmarks.measure import version

STOCK, AGAIN = "stock", "stock again"
CHECKPOINTING, OFFLOAD, LIGER, COMPILE, BUDGET = "checkpointing", "offload", "liger", "compile", "compile, budget"
PEERS = (CHECKPOINTING, OFFLOAD, LIGER, COMPILE, BUDGET)
EXACT_RECIPES = ("exact-unfolded", "exact-levels")
#: Ways whose gradients are stock's to rounding.
EXACT = (STOCK, AGAIN, *EXACT_RECIPES, *PEERS)
#: Of what the compiler would keep by itself (`torch._functorch.config.activation_memory_budget`).
COMPILER_BUDGET = 0.5
#: Liger's normalisations fail in Triton's interpreter, the only way to run its kernels without a GPU.
_NEEDS_GPU = {
    LIGER: "its kernels need a GPU",
    OFFLOAD: "block inputs are in host memory already: it needs a GPU",
}


def check(way: str, device: str) -> None:
    """Whether `way` can run here.

    Raises:
        CannotRun: it needs a GPU, a package that is missing, or a checkpoint.
        RecipeError: it is neither a way nor a recipe.
    """
    if way in _NEEDS_GPU and device == "cpu":
        raise CannotRun(_NEEDS_GPU[way])
    if way == "exact":
        raise CannotRun("it folds norms into a checkpoint, whose training takes another path; see exact-unfolded")
    if way == LIGER and version("liger_kernel") is None:
        raise CannotRun("liger_kernel is not installed; get it with: make setup-train")
    if way not in (STOCK, AGAIN, *PEERS):
        memopt.load_recipe(way)


def prepare(way: str, model: nn.Module, seed: int) -> Callable[..., Any]:
    """Change a stock model as `way` does; returns what is to be called in its place.

    Args:
        way: see the top of the file.
        model: in train mode, with its adapters, on its device.
        seed: what `stock again` draws from.

    Raises:
        CannotRun: it has nothing for this model.
    """
    base: Any = getattr(model, "get_base_model", lambda: model)()
    if way == AGAIN:
        move_by_one_ulp(model.parameters(), seed)
    elif way in (CHECKPOINTING, OFFLOAD):
        if hasattr(base, "activation_checkpointing_enable"):
            base.activation_checkpointing_enable(offload=way == OFFLOAD)
        elif way == OFFLOAD:
            raise CannotRun("the installed transformers does not offload the inputs of checkpoints")
        else:
            base.gradient_checkpointing_enable()
    elif way == LIGER:
        _apply_liger(base)
    elif way in (COMPILE, BUDGET):
        import torch._functorch.config as functorch

        functorch.activation_memory_budget = COMPILER_BUDGET if way == BUDGET else 1.0
        compiled: Callable[..., Any] = torch.compile(model)
        return compiled
    elif way != STOCK:
        memopt.patch(model, way)
    return model


def _apply_liger(model: Any) -> None:
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    apply = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model.config.model_type)
    if apply is None:
        raise CannotRun(f"Liger {version('liger_kernel')} has nothing for {model.config.model_type}")
    apply(model=model)
