"""The implementations of attention to which transformers switches a model: what each needs, and the switch.

A trace needs no package: what the implementation allocates is known (`memopt.trace.kernels`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from importlib.util import find_spec
from itertools import compress
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

Implementation = Literal["sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "eager"]

FLASH: tuple[Implementation, ...] = ("flash_attention_2", "flash_attention_3")
#: Implementation without a tensor of tokens x tokens -> the class attribute of models that support it.
FUSED: dict[str, str] = {
    "sdpa": "_supports_sdpa",
    **dict.fromkeys(FLASH, "_supports_flash_attn"),
    "flex_attention": "_supports_flex_attn",
}
#: Implementation -> packages, of which it needs one.
_PACKAGES = {"flash_attention_2": ("flash_attn", "kernels"), "flash_attention_3": ("flash_attn_interface", "kernels")}
_needs_none: ContextVar[bool] = ContextVar("_needs_none", default=False)


@contextlib.contextmanager
def without_packages() -> Iterator[None]:
    """Inside, a model is switched to every implementation that its class supports, whether or not it can run here."""
    token = _needs_none.set(True)
    try:
        yield
    finally:
        _needs_none.reset(token)


def missing(implementation: str) -> tuple[str, ...]:
    """The packages of which `implementation` needs one, if none of them is installed."""
    packages = _PACKAGES.get(implementation, ())
    return () if _needs_none.get() or any(find_spec(package) for package in packages) else packages


def switch(model: PreTrainedModel, implementation: str) -> None:
    """Let `model`, and the models inside it that support it, run this implementation of attention. Raises a ValueError
    if the class of `model` does not support it, and an ImportError if its package is missing."""
    if not _needs_none.get():
        model.set_attn_implementation(implementation)
        return
    from transformers import PreTrainedModel

    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    before = [part.config._attn_implementation for part in parts]
    able = [_supports(part, implementation) for part in parts]
    if not able[0]:
        raise ValueError(f"{type(model).__name__} does not support it")
    # A part may have a config that no config around it refers to: a copy, as T5's encoder and decoder have.
    for part in compress(parts, able):
        part.config._attn_implementation = implementation  # of the configs inside as well
    for part, is_able, old in zip(parts, able, before, strict=True):
        if not is_able:
            part.config._attn_implementation = old


def switch_walked(model: nn.Module, implementation: str | None) -> None:
    """Let a copy of a model that is only walked run eager attention, if it shall and can: a walk finds its softmaxes.
    The other implementations have none, and not all of them run on meta tensors."""
    from transformers import PreTrainedModel

    first = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if implementation == "eager" and first is not None:
        with contextlib.suppress(ValueError):
            first.set_attn_implementation(implementation)


def _supports(model: PreTrainedModel, implementation: str) -> bool:
    flag = FUSED.get(implementation)
    return model._can_set_attn_implementation() and (flag is None or bool(getattr(model, flag, False)))
