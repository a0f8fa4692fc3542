"""PEFT's LoRA around a plain linear, run as one autograd function that calls no module inside. A quantised linear is
called, and only its adapter is one function.

A comparison on a small layer, made once, proves that the installed PEFT computes these formulas.

PEFT's own forward runs if it has to compute more than the plain formula (dropout, DoRA, several adapters, merged or
disabled ones), or if a module inside has to be called (`memopt.patches.swap.is_watched`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memopt.environment.generators import generators_kept
from memopt.kernels.linear.adapted import adapted_linear, added_adapter
from memopt.patches.swap import is_watched, parameters_of, steps_aside, with_attributes

_READS_SPECS = "_memopt_reads_specs"
#: Marks forwards of linears that were swapped only to read recompute specs; such linears need not be called.
reads_specs = with_attributes(**{_READS_SPECS: True})
#: Forwards of PEFT: module and name -> whether the adapter's term is rounded before it is added.
_FORWARDS = {
    ("peft.tuners.lora.layer", "Linear.forward"): False,
    ("peft.tuners.lora.bnb", "Linear4bit.forward"): True,
    ("peft.tuners.lora.bnb", "Linear8bitLt.forward"): True,
}


@dataclass(frozen=True)
class AdaptedRewrite:
    """State of a LoRA layer; its forward looks up everything else at every call."""

    rounds: bool = False
    """Whether the adapter's term is rounded to the dtype of the quantised linear's output before it is added."""


def as_adapted(module: nn.Module) -> AdaptedRewrite | None:
    """The state for `module` if its forward is one of PEFT's LoRA around linears, and is proved; else None."""
    forward: Any = type(module).forward
    rounds = _FORWARDS.get((getattr(forward, "__module__", ""), getattr(forward, "__qualname__", "")))
    if rounds is None or "forward" in vars(module) or not _is_proved(forward, rounds):
        return None
    return AdaptedRewrite(rounds)


@functools.cache
def _is_proved(forward: Callable[..., Tensor], rounds: bool) -> bool:
    """:func:`_agrees`, run in another thread: no mode, autocast or hook of the caller is active there."""
    with ThreadPoolExecutor(1) as alone:
        return alone.submit(_agrees, forward, rounds).result()


@generators_kept()
def _agrees(forward: Callable[..., Tensor], rounds: bool) -> bool:
    """Whether memopt's functions and `forward` return equal bits for a small layer with one adapter."""
    from peft import LoraConfig, get_peft_model

    try:
        base = nn.Sequential(nn.Linear(7, 5, device="cpu", dtype=torch.bfloat16 if rounds else torch.float32))
        config = LoraConfig(r=3, lora_alpha=4, target_modules=["0"], init_lora_weights=False)
        around: Any = get_peft_model(base, config)
        layer = around.base_model.model[0]
        if not rounds and type(layer).forward is not forward:
            return False
        linear = layer.base_layer
        x = torch.randn(2, 3, 7, device="cpu", dtype=linear.weight.dtype, requires_grad=True) * 2
        found = _adapter(layer)
        if found is None:
            return False
        sums = [added_adapter(linear, x, *found, rounds=rounds)]
        sums += [] if rounds else [adapted_linear(x, linear.weight, linear.bias, *found)]
        expected = forward(layer, x)
        return all(each is not None and torch.equal(each, expected) for each in sums)
    except Exception:  # another release of PEFT, whose own forward runs then
        return False


def run_adapted(
    stock: Callable[..., Tensor], rewrite: AdaptedRewrite, module: nn.Module, *args: Any, **kwargs: Any
) -> Tensor:
    """The forward of a layer for which :func:`as_adapted` returns a state."""
    found = _adapter(module) if len(args) == 1 and not kwargs and not steps_aside() else None
    if found is None:
        return stock(module, *args, **kwargs)
    linear = module._modules["base_layer"]
    assert linear is not None
    weight, bias = _parameters(linear)
    if weight is not None:
        y = adapted_linear(args[0], weight, bias, *found)
    elif isinstance(linear, nn.Linear) and not _is_known(linear):
        y = added_adapter(linear, args[0], *found, rounds=rewrite.rounds)
    else:
        y = None
    return stock(module, *args, **kwargs) if y is None else y


def _adapter(module: nn.Module) -> tuple[Tensor, Tensor, float] | None:
    """A, B and scaling; None if another formula has to be computed, or modules of the adapter have to be called."""
    own, children = vars(module), module._modules
    name: Any = own.get("_active_adapter")
    if type(name) is list and len(name) == 1:
        name = name[0]
    if type(name) is not str or own.get("_disable_adapters", True) or own.get("merged_adapters", True):
        return None
    if own.get("lora_variant", True) or not own.get("cast_input_dtype_enabled"):
        return None
    dropout = _of(children, "lora_dropout", name)
    if type(dropout) is not nn.Identity or is_watched(dropout):
        return None
    a, no_bias = _parameters(_of(children, "lora_A", name))
    b, none = _parameters(_of(children, "lora_B", name))
    if a is None or b is None or no_bias is not None or none is not None:
        return None
    return a, b, own["scaling"][name]


def _of(children: dict[str, nn.Module | None], part: str, adapter: str) -> nn.Module | None:
    parts = children[part]
    return None if parts is None else parts._modules.get(adapter)


def _parameters(linear: nn.Module | None) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias of `linear`; the weight is None if `linear` has to be called."""
    if linear is None or not _is_known(linear):
        return None, None
    # A tool that computes weight or bias from other tensors removes them from the parameters.
    own = parameters_of(linear)
    return (None, None) if is_watched(linear) or "bias" not in own else (own.get("weight"), own["bias"])


def _is_known(linear: nn.Module) -> bool:
    """Whether the forward of `linear` is PyTorch's, or one of memopt's that only reads recompute specs."""
    kind = type(linear)
    return kind is nn.Linear or (hasattr(kind, _READS_SPECS) and issubclass(kind, nn.Linear))
