"""Building the model of a config on a device, with the settings that a walk needs."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel

from memopt.errors import ModelError
from memopt.walk.aten.precision import default_dtype
from memopt.walk.models.config import config_nodes, is_integer, model_class, one_line
from memopt.walk.models.limits import bounded_build

_safe_creation: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
with contextlib.suppress(ImportError):  # Old remote code reads values of a torch.linspace in __init__.
    from transformers.initialization import meta_device_safe_creation_ops as _safe_creation

#: Attention implementation that every transformers class has.
_FALLBACK_ATTENTION = "eager"


def instantiate(
    config: PreTrainedConfig,
    *,
    device: str,
    dtype: torch.dtype | None = None,
    attn_implementation: str = "sdpa",
    experts_implementation: str = "eager",
) -> PreTrainedModel:
    """A model of a copy of `config`, with initial values, without a cache, in training mode as torch builds it.

    Raises:
        ModelError: the class cannot be built from this config.
    """
    cls = model_class(config)
    attempts = list(dict.fromkeys((attn_implementation, _FALLBACK_ATTENTION)))
    for attention in attempts:
        prepared = _prepare(config, attention, experts_implementation)
        try:
            return _construct(cls, prepared, device, dtype or _config_dtype(config))
        except ModelError:
            raise
        except Exception as error:
            if attention != attempts[-1]:
                continue
            raise ModelError(
                f"{cls.__name__} cannot be built from its config: {type(error).__name__}: {one_line(error)}."
            ) from error
    raise AssertionError("unreachable: the last attempt returns or raises")


def _construct(
    cls: type[PreTrainedModel], config: PreTrainedConfig, device: str, dtype: torch.dtype
) -> PreTrainedModel:
    on_meta = device == "meta"
    safe = _safe_creation() if on_meta else contextlib.nullcontext()
    numbers = _Numbers() if on_meta else contextlib.nullcontext()
    with torch.device(device), numbers, default_dtype(dtype), safe, bounded_build():
        return cls(config)


class _Numbers(TorchFunctionMode):
    """Makes tensors of single integers on the CPU, with values: a forward computes sizes (a stride) from them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and args and is_integer(args[0]) and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


def numbers_in(model: nn.Module) -> dict[str, torch.Tensor]:
    """The 0-dimensional integer buffers of `model` that have values and are in no checkpoint, by name."""
    found = {
        name: buffer
        for name, buffer in model.named_buffers()
        if not (buffer.is_meta or buffer.dim() or buffer.is_floating_point())
    }
    saved = model.state_dict() if found else {}
    return {name: buffer for name, buffer in found.items() if name not in saved}


def _prepare(config: PreTrainedConfig, attention: str, experts: str) -> PreTrainedConfig:
    prepared = copy.deepcopy(config)
    prepared._attn_implementation = attention
    for node in config_nodes(prepared):
        if "use_cache" in vars(node):
            node.use_cache = False
        if hasattr(node, "_experts_implementation"):
            node._experts_implementation = experts
    return prepared


def _config_dtype(config: PreTrainedConfig) -> torch.dtype:
    dtype = config.dtype
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else torch.float32
