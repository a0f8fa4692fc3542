"""Building the model of a config on a device, with the settings that a walk needs."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from memopt.errors import ModelError
from memopt.walk.aten.precision import default_dtype
from memopt.walk.models.config import config_nodes, model_class, one_line
from memopt.walk.models.limits import bounded_build

_safe_creation: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
with contextlib.suppress(ImportError):  # Old remote code reads values of a torch.linspace in __init__.
    from transformers.initialization import meta_device_safe_creation_ops as _safe_creation

#: Every transformers class has it.
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
    safe = _safe_creation() if device == "meta" else contextlib.nullcontext()
    with torch.device(device), default_dtype(dtype), safe, bounded_build():
        return cls(config)


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
