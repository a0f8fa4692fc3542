"""PEFT's LoRA around a plain linear, run as one function: no module inside it is called. Around a quantised linear,
which is called, the adapter is one function.

That the installed PEFT computes these formulas is proved on a small layer, once.

Where anything but the plain formula is to be computed (dropout, DoRA, several adapters, merged or disabled ones), or a
module inside is watched, PEFT's own forward runs.
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
from memopt.patches.swap import is_watched, steps_aside, with_attributes

_READS_SPECS = "_memopt_reads_specs"
#: Marks the forward of linears that were only swapped to read recompute specs: their parameters may be read instead.
reads_specs = with_attributes(**{_READS_SPECS: True})
#: Forwards of PEFT: module and name -> whether the adapter's term is rounded before it is added.
_FORWARDS = {
    ("peft.tuners.lora.layer", "Linear.forward"): False,
    ("peft.tuners.lora.bnb", "Linear4bit.forward"): True,
    ("peft.tuners.lora.bnb", "Linear8bitLt.forward"): True,
}


@dataclass(frozen=True)
class AdaptedRewrite:
    """State of such a layer, which looks up everything else at every call."""

    rounds: bool = False
    """The adapter's term is rounded to the dtype of the output of a quantised linear before it is added."""


def as_adapted(module: nn.Module) -> AdaptedRewrite | None:
    """The state for `module` if it has a forward of PEFT's LoRA around linears, and that computes the formula."""
    forward: Any = type(module).forward
    rounds = _FORWARDS.get((getattr(forward, "__module__", ""), getattr(forward, "__qualname__", "")))
    if rounds is None or "forward" in vars(module) or not _is_proved(forward, rounds):
        return None
    return AdaptedRewrite(rounds)


@functools.cache
def _is_proved(forward: Callable[..., Tensor], rounds: bool) -> bool:
    """In a thread of its own: no mode, autocast or hook of the forward that asks is active there."""
    with ThreadPoolExecutor(1) as alone:
        return alone.submit(_agrees, forward, rounds).result()


@generators_kept()
def _agrees(forward: Callable[..., Tensor], rounds: bool) -> bool:
    """Whether `forward` of a small layer with one adapter is what the functions return, to the bit."""
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
    except Exception:  # of another release of PEFT: its own forward runs, as before
        return False


def run_adapted(
    stock: Callable[..., Tensor], rewrite: AdaptedRewrite, module: nn.Module, *args: Any, **kwargs: Any
) -> Tensor:
    """The forward of a layer that :func:`as_adapted` knows."""
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
    """A, B and scaling; None if the forward is to compute something else, or call watched modules of the adapter."""
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
    """Weight and bias of a linear that need not be called; no weight where it has to be."""
    if linear is None or not _is_known(linear):
        return None, None
    own = linear._parameters
    # A tool that computes weight or bias from something else takes them out of the parameters.
    return (None, None) if is_watched(linear) or "bias" not in own else (own.get("weight"), own["bias"])


def _is_known(linear: nn.Module) -> bool:
    """Whether the forward of `linear` is PyTorch's, or one of memopt's that only reads recompute specs."""
    kind = type(linear)
    return kind is nn.Linear or (hasattr(kind, _READS_SPECS) and issubclass(kind, nn.Linear))
