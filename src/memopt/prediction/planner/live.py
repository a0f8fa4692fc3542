"""The plan for a model in memory: traced from its config, with the parameters that it really has."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from memopt.errors import ModelError
from memopt.plan.recipe import Recipe
from memopt.prediction.planner.choice import Choice
from memopt.prediction.planner.training import plan_step
from memopt.prediction.trace import parameters_of
from memopt.reporting.quantised import quantisation_of
from memopt.reporting.step import Step
from memopt.reporting.subject import default_seq, reads_tokens
from memopt.reporting.training import ALL_LINEAR, Precision, Training
from memopt.walk.models.build import build_meta
from memopt.walk.observe import find_sites
from memopt.walk.sites import Sites

_PRECISIONS: dict[torch.dtype, Precision] = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def plan_model(
    model: nn.Module, budget: str | int, recipe: Recipe, *, batch: int | None = None, seq: int | None = None
) -> Choice:
    """The fastest plan within which `model` trains, as it is: its dtype, its LoRA adapters.

    Without adapters all weights count as trained, frozen ones too.

    Args:
        budget: memory of the device: ``24GiB``, the name of a card, or a number of bytes.
        recipe: what the plan changes.
        batch: rows in a batch, else 1.
        seq: tokens in a row, else what the config allows up to 2048.

    Raises:
        ModelError: `model` has no transformers config that it can be traced from, or adapters other than LoRA's.
        NegativeVerdict: nothing fits.
    """
    base = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if base is None:
        raise ModelError(
            f"A budget needs a transformers model, and {type(model).__name__} holds none.", "Pass a recipe instead."
        )
    config = copy.deepcopy(base.config)
    config.architectures = [type(base).__name__]
    parameters = list(parameters_of(model))
    weights = Counter[torch.dtype]()
    for each in parameters:
        weights[each.dtype] += each.nbytes
    sites = find_sites(build_meta(config))
    adapters: Any = next(iter(getattr(model, "peft_config", {}).values()), None)
    adapted = [name for name, module in base.named_modules() if getattr(module, "lora_A", None)]
    if adapters is not None and not adapted:
        raise ModelError(
            f"A budget is for LoRA or full fine-tuning, and {type(adapters).__name__} is neither.",
            "Pass a recipe instead.",
        )
    known = (_PRECISIONS[dtype] for dtype, _ in weights.most_common() if dtype in _PRECISIONS)
    precision: Precision = next(known, "bf16")
    training = Training(
        batch=batch or 1,
        seq=(seq or default_seq(config)) if reads_tokens(config) else None,
        precision=precision,
        train="full" if adapters is None else "lora" if quantisation_of(config) is None else "qlora",
        lora_rank=getattr(adapters, "r", 8),
        lora_targets=_short(adapted, sites) or (ALL_LINEAR,),
        adapter_fp32=precision != "fp32" and any(each.trained and each.dtype == torch.float32 for each in parameters),
    )
    held = sum(each.nbytes for each in parameters)
    return plan_step(type(base).__name__, Step(config, training, sites, recipe), budget, held=held)


def _short(adapted: Sequence[str], sites: Sites) -> tuple[str, ...]:
    """The last parts of these modules' names, where no other linear has one of them; else their whole names."""
    last = {name.rpartition(".")[2] for name in adapted}
    alike = {site.module for site in sites.linears if site.module.rpartition(".")[2] in last}
    return tuple(sorted(last)) if alike == set(adapted) else tuple(adapted)
