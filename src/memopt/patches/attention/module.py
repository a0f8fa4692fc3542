"""Set a model's attention implementation; undoing it restores the setting of every part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from memopt.patches.swap import Rewrite, swap_forward, wraps_any_forward
from memopt.walk.models.attention import switch


@dataclass(frozen=True)
class AttentionRewrite(Rewrite):
    """The old settings of all configs, the outermost first, because setting a config also sets the configs inside."""

    before: tuple[tuple[PreTrainedConfig, str | None], ...]

    def undo(self, module: nn.Module) -> None:
        for config, implementation in self.before:
            config._attn_implementation = implementation


def first_pretrained(modules: Mapping[str, nn.Module]) -> str:
    """Name of the outermost module that is a transformers model (adapters may be around it); "" without one."""
    return next((name for name, module in modules.items() if isinstance(module, PreTrainedModel)), "")


def set_implementation(model: nn.Module, implementation: str) -> None:
    """Let `model` run this implementation of attention. Raises: ValueError: the model does not support it, or this
    machine cannot run it; the model is unchanged then.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError("it is not a transformers model, so its attention has no switch")
    rewrite = AttentionRewrite(tuple(_settings(model)))
    try:
        switch(model, implementation)
        swap_forward(model, _as_it_is, rewrite)
    except (ImportError, ValueError) as error:
        rewrite.undo(model)
        first_sentence = " ".join(str(error).split()).split(". ")[0].rstrip(".")
        raise ValueError(f"its attention cannot be {implementation}: {first_sentence}") from None
    if model.config._attn_implementation != implementation:
        model_class = type(model).__name__
        rewrite.undo(model)
        raise ValueError(f"{model_class} has no switch for its attention")


def _settings(model: PreTrainedModel) -> list[tuple[PreTrainedConfig, str | None]]:
    """Every config of `model` and its setting, the outermost first."""
    found: dict[int, PreTrainedConfig] = {}
    waiting = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    while waiting:
        config = waiting.pop(0)
        if id(config) not in found:
            found[id(config)] = config
            waiting += [each for name in config.sub_configs if (each := getattr(config, name, None)) is not None]
    return [(config, config._attn_implementation) for config in found.values()]


@wraps_any_forward
def _as_it_is(
    stock: Callable[..., Any], rewrite: AttentionRewrite, module: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    return stock(module, *args, **kwargs)
