"""PEFT's LoRA around a plain linear, run as one function: no module inside it is called.

That the installed PEFT computes this formula is proved on a small layer, once.

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
from memopt.kernels.linear.adapted import adapted_linear
from memopt.patches.swap import is_watched, steps_aside, with_attributes

_READS_SPECS = "_memopt_reads_specs"
#: Marks the forward of linears that were only swapped to read recompute specs: their parameters may be read instead.
reads_specs = with_attributes(**{_READS_SPECS: True})
_FORWARD = ("peft.tuners.lora.layer", "Linear.forward")


@dataclass(frozen=True)
class AdaptedRewrite:
    """State of such a layer: empty, because it looks up everything at every call."""


def is_adapted(module: nn.Module) -> bool:
    """Whether `module` has the forward of PEFT's LoRA around linears, and that computes the formula of the function."""
    forward: Any = type(module).forward
    names = getattr(forward, "__module__", None), getattr(forward, "__qualname__", None)
    return names == _FORWARD and "forward" not in vars(module) and _is_proved(forward)


@functools.cache
def _is_proved(forward: Callable[..., Tensor]) -> bool:
    """In a thread of its own: no mode, autocast or hook of the forward that asks is active there."""
    with ThreadPoolExecutor(1) as alone:
        return alone.submit(_agrees, forward).result()


@generators_kept()
def _agrees(forward: Callable[..., Tensor]) -> bool:
    """Whether `forward` of a small layer with one adapter is what :func:`adapted_linear` returns, to the bit."""
    from peft import LoraConfig, get_peft_model

    try:
        base = nn.Sequential(nn.Linear(7, 5, device="cpu", dtype=torch.float32))
        config = LoraConfig(r=3, lora_alpha=4, target_modules=["0"], init_lora_weights=False)
        around: Any = get_peft_model(base, config)
        layer = around.base_model.model[0]
        x = torch.randn(2, 3, 7, device="cpu", dtype=torch.float32, requires_grad=True) * 2
        found = _parts(layer)
        y = None if found is None else adapted_linear(x, *found)
        return y is not None and type(layer).forward is forward and torch.equal(y, forward(layer, x))
    except Exception:  # of another release of PEFT: its own forward runs, as before
        return False


def run_adapted(
    stock: Callable[..., Tensor], rewrite: AdaptedRewrite, module: nn.Module, *args: Any, **kwargs: Any
) -> Tensor:
    """The forward of a layer for which :func:`is_adapted` holds."""
    found = _parts(module) if len(args) == 1 and not kwargs and not steps_aside() else None
    y = None if found is None else adapted_linear(args[0], *found)
    return stock(module, *args, **kwargs) if y is None else y


def _parts(module: nn.Module) -> tuple[Tensor, Tensor | None, Tensor, Tensor, float] | None:
    """Weight, bias, A, B and scaling; None if the forward is to compute something else, or call watched modules."""
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
    weight, bias = _parameters(children["base_layer"])
    a, no_bias = _parameters(_of(children, "lora_A", name))
    b, none = _parameters(_of(children, "lora_B", name))
    if weight is None or a is None or b is None or no_bias is not None or none is not None:
        return None
    return weight, bias, a, b, own["scaling"][name]


def _of(children: dict[str, nn.Module | None], part: str, adapter: str) -> nn.Module | None:
    parts = children[part]
    return None if parts is None else parts._modules.get(adapter)


def _parameters(linear: nn.Module | None) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias of a linear that need not be called; no weight where it has to be."""
    kind = type(linear)
    if linear is None or not (kind is nn.Linear or (hasattr(kind, _READS_SPECS) and issubclass(kind, nn.Linear))):
        return None, None
    own = linear._parameters
    # A tool that computes weight or bias from something else takes them out of the parameters.
    return (None, None) if is_watched(linear) or "bias" not in own else (own.get("weight"), own["bias"])
