"""LoRA adapters of PEFT on a model without weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from memopt.errors import ModelError
from memopt.trace.quantised import Linear4bit
from memopt.trace.training import ALL_LINEAR, Adapters, Training, check_peft
from memopt.walk.models.config import one_line
from memopt.walk.sites import Sites


def add_adapters(model: PreTrainedModel, sites: Sites, training: Training) -> nn.Module:
    """`model` (on the meta device, changed in place as PEFT does) with the LoRA adapters of `training`, the rest
    frozen. Raises a ModelError if peft is not installed, no linear of the blocks has the name of a target, no module
    that of one to save, a linear returns more than one tensor, or DoRA is to adapt weights in 4 bits."""
    check_peft()
    from peft import LoraConfig, get_peft_model

    rank, targets, fp32 = training.lora_rank, training.lora_targets, training.adapter_fp32 or training.train == "qlora"
    if training.use_dora and training.train == "qlora":
        raise ModelError("DoRA on 4-bit weights is not traced.", "Leave out --use-dora (use_dora).")
    chosen = ALL_LINEAR if targets == (ALL_LINEAR,) else _resolve(targets, sites)
    saved = list(training.modules_to_save)
    for each in saved:  # PEFT trains nothing for a name that no module has
        if not any(name.endswith(each) for name, _ in model.named_modules()):
            known = dict.fromkeys(name.rpartition(".")[2] for name, _ in model.named_children())
            raise ModelError(f"No module is named '{each}' (--modules-to-save).", f"Outermost: {', '.join(known)}.")
    config = LoraConfig(
        r=rank,
        target_modules=chosen,
        lora_dropout=training.lora_dropout,
        modules_to_save=saved or None,
        use_dora=training.use_dora,
    )
    config._register_custom_module({Linear4bit: _on_4_bits()})
    try:
        adapted: nn.Module = get_peft_model(model, config, autocast_adapter_dtype=fp32, low_cpu_mem_usage=True)
    except (TypeError, ValueError) as error:
        if saved and "modules_to_save" in str(error):  # of a ModuleList, or of all that has targets
            reason = f"PEFT cannot train these modules in full: {one_line(error)}."
            raise ModelError(reason, "Name others with --modules-to-save.") from error
        others = [name for name in _names(sites) if f"'{name}'" not in str(error)]
        raise ModelError(
            f"PEFT cannot adapt these linears: {one_line(error)}.",
            f"Name others with --lora-targets; the blocks have: {', '.join(others)}.",
        ) from error
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        reason = f"Adapters of rank {rank} are too large to make here."
        raise ModelError(reason, "Use a smaller --lora-rank.") from error
    return _finished(adapted, model, sites, fp32=fp32)


def add_live_adapters(model: PreTrainedModel, sites: Sites, adapters: Adapters, *, fp32: bool) -> nn.Module:
    """`model` (on the meta device, changed in place) with the adapters of a live model, whatever their configs say;
    with `fp32`, adapters in fp32 beside 16-bit weights. Raises a ModelError if PEFT cannot add them to a model without
    weights, or they compute otherwise on 4-bit weights."""
    from peft import get_peft_model

    adapted: Any = None
    for name, live in adapters.configs.items():
        config = copy.deepcopy(live)
        if hasattr(config, "init_lora_weights"):
            config.init_lora_weights = True  # other ways read the values of the weights
        if hasattr(config, "_register_custom_module"):
            config._register_custom_module({Linear4bit: _on_4_bits()})
        options: dict[str, Any] = {"autocast_adapter_dtype": fp32, "low_cpu_mem_usage": True}
        try:
            if adapted is None:
                adapted = get_peft_model(model, config, adapter_name=name, **options)
            else:
                adapted.add_adapter(name, config, **options)
        except Exception as error:
            raise ModelError(
                f"The adapters of the model cannot be added to one without weights: {one_line(error)}.",
                "Pass a recipe instead of a budget.",
            ) from error
    adapted.base_model.set_adapter(list(adapters.active))
    layers = (module for module in model.modules() if isinstance(getattr(module, "base_layer", None), Linear4bit))
    if any(getattr(layer, "lora_variant", None) for layer in layers):
        raise ModelError(
            "A budget for adapters on 4-bit weights is for plain LoRA: DoRA and other variants are not traced there.",
            "Pass a recipe instead of a budget.",
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in adapters.trained)
    return _finished(adapted, model, sites, fp32=fp32)


def _finished(adapted: nn.Module, model: PreTrainedModel, sites: Sites, *, fp32: bool) -> nn.Module:
    _check_outputs(model, sites)
    for parameter in () if fp32 else adapted.parameters():
        if parameter.requires_grad:  # PEFT matches the base weights' dtype only if they have data.
            parameter.data = parameter.data.to(model.dtype)
    return adapted


def _check_outputs(model: PreTrainedModel, sites: Sites) -> None:
    """Raise a ModelError if PEFT cannot add to the output of a linear with an adapter: it returns more than one tensor,
    or multiplies rows by groups."""
    odd = {}
    for name, module in model.named_modules():
        base = module._modules.get("base_layer")
        if not isinstance(base, nn.Linear) or type(base).forward is nn.Linear.forward:
            continue
        if type(base.weight) is not nn.Parameter:  # a 4-bit linear of bitsandbytes needs values to run
            continue
        last = name.rpartition(".")[2]
        try:
            output = base(base.weight.new_empty(2, base.in_features))
        except RuntimeError:
            odd[last] = "its forward fails on a matrix of inputs"
            continue
        if not isinstance(output, Tensor):
            odd[last] = f"it returns a {type(output).__name__}, not one tensor"
    if odd:
        names = ", ".join(f"'{name}'" for name in odd)
        others = ",".join(name for name in _names(sites) if name not in odd)
        raise ModelError(
            f"PEFT cannot train the model with an adapter on {names}: {next(iter(odd.values()))}.",
            f"Leave it out: --lora-targets {others}; in LoraConfig exclude_modules={list(odd)}.",
        )


def _on_4_bits() -> type[nn.Module]:
    """PEFT's layer for a `Linear4bit`, as in peft/tuners/lora/bnb.py, which PEFT defines only beside bitsandbytes."""
    from peft.tuners.lora.layer import Linear

    class Adapted(Linear):
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            # PEFT's layer casts nothing itself if autocast is on for CUDA.
            casts = not (getattr(self.base_layer, "cuda_kernels", False) and torch.is_autocast_enabled("cpu"))
            result: Tensor = self.base_layer(x).clone()
            for name in self.active_adapters:
                first: Any = self.lora_A[name]
                x = x.to(first.weight.dtype) if casts else x
                output = self.lora_B[name](first(self.lora_dropout[name](x))) * self.scaling[name]
                result = result + (output.to(result.dtype) if casts else output)
            return result

    # memopt recognises PEFT's forward by its module and qualified name.
    Adapted.forward.__module__, Adapted.forward.__qualname__ = "peft.tuners.lora.bnb", "Linear4bit.forward"
    return Adapted


def _resolve(targets: Sequence[str], sites: Sites) -> list[str]:
    names = _names(sites)
    modules = {site.module for site in sites.linears}
    chosen = [target for target in targets if target in modules]
    for target in (each for each in targets if each not in modules):
        found = [name for name in names if name == target] or [name for name in names if name.startswith(target)]
        if not found:
            raise ModelError(f"No linear of the model is named '{target}'.", f"It has: {', '.join(names)}.")
        chosen += found
    return chosen


def _names(sites: Sites) -> list[str]:
    """Last parts of the names of the linears in the blocks."""
    inside = tuple(f"{block}." for block in sites.blocks) or ""
    linears = (site for site in sites.linears if len(site.shape) == 2 and site.module.startswith(inside))
    return sorted({site.module.rpartition(".")[2] for site in linears})
