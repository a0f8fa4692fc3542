"""Models of configs, on any device: the real shape on meta tensors, and the meta copy of a live model. No weights are
ever read."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from math import prod
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel

from memopt.environment.partitioned import shape_of
from memopt.errors import ModelError
from memopt.torch_compat import is_traceable_wrapper_subclass, storage_id
from memopt.walk.aten.precision import default_dtype
from memopt.walk.aten.rules import tensors_in
from memopt.walk.models.config import config_nodes, is_integer, model_class, one_line
from memopt.walk.models.limits import bounded_build, watched_build

_safe_creation: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
with contextlib.suppress(ImportError):  # Old remote code reads values of a torch.linspace in __init__.
    from transformers.initialization import meta_device_safe_creation_ops as _safe_creation

#: A class that refuses an attention gets transformers' choice for it and each model inside, else the one that all have.
_FALLBACKS = (None, "eager")


def instantiate(
    config: PreTrainedConfig,
    *,
    device: str,
    dtype: torch.dtype | None = None,
    attn_implementation: str = "sdpa",
    experts_implementation: str = "eager",
) -> PreTrainedModel:
    """A model of a copy of `config`, with initial values, without a cache, in training mode as torch builds it. Raises
    a ModelError if the class cannot be built from this config."""
    cls = model_class(config)
    attempts = list(dict.fromkeys((attn_implementation, *_FALLBACKS)))
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


def _prepare(config: PreTrainedConfig, attention: str | None, experts: str) -> PreTrainedConfig:
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


def build_meta(config: PreTrainedConfig, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The model of `config` in its real shape on the meta device: every name and shape, no memory, eval mode.

    Only the buffers of `numbers_in` have values. `dtype` defaults to the config's. Attention is SDPA; where the class
    refuses that, what transformers chooses for it and for each model inside. Experts run as one batched product,
    because their eager loop branches on values, which meta tensors lack. Raises a ModelError if there is no class for
    the config, or it cannot be built from it.
    """
    with watched_build():
        model = instantiate(config, device="meta", dtype=dtype, experts_implementation="batched_mm")
    # Some constructors of parameters ignore the default device.
    numbers = numbers_in(model)
    nn.Module.to(model, "meta")
    for name, number in numbers.items():
        holder, _, own = name.rpartition(".")
        setattr(model.get_submodule(holder), own, number)
    model.eval()
    return model


def run_experts(model: Any, implementation: str) -> None:
    """Run the experts of `model`, if it has any: by ``grouped_mm``, as transformers trains them (the batched form of
    `build_meta` saves copies of weights per token), or ``eager``, one after another, as PyTorch has no grouped products
    in fp64."""
    with contextlib.suppress(ValueError, AttributeError):  # no experts, or no choice of how they run
        model.set_experts_implementation(implementation)


def clone_to_meta(model: nn.Module) -> nn.Module:
    """A structural copy of `model` with every tensor but `numbers_in` on meta: no storage is copied or allocated.

    Names, ties (also views that overlap), dtypes, strides, ``requires_grad`` and hooks are those of `model`;
    gradients are dropped. Works for any module, wrapped (PEFT) or not. A quantised linear, which stores codes in the
    place of its weight, becomes a plain linear: its own forward on meta tensors depends on its library.
    """
    numbers = {id(number) for number in numbers_in(model).values()}
    # With tensors that modules hold as plain attributes, also in lists, tuples and dicts.
    held = (tensor for module in model.modules() for tensor in tensors_in(vars(module)))
    tensors = [tensor for tensor in held if id(tensor) not in numbers]
    storages = _meta_storages(filter(_is_strided, tensors))
    # deepcopy looks every object up in the memo first, so a tensor found there is replaced and never copied.
    memo: dict[int, Any] = {id(tensor): _meta_twin(tensor, storages) for tensor in tensors}
    for value in (value for module in model.modules() for value in vars(module).values()):
        if isinstance(value, _SHARED):
            memo[id(value)] = value
    clone = copy.deepcopy(model, memo)
    dtype = next((p.dtype for p in model.parameters() if type(p) is nn.Parameter and p.is_floating_point()), None)
    for name, module in model.named_modules():
        if name and _is_quantised_linear(module):
            parent, _, child = name.rpartition(".")
            clone.get_submodule(parent)._modules[child] = _QuantisedLinear(module, dtype).train(module.training)
    return clone


#: Types of attributes without state of the model, which deepcopy refuses.
_SHARED = (staticmethod, classmethod, ModuleType, type(threading.Lock()), type(threading.RLock()))


class _QuantisedLinear(nn.Linear):
    """Stands for a quantised linear: multiplies its input, of any dtype, by a frozen weight."""

    def __init__(self, module: Any, dtype: torch.dtype | None) -> None:
        bias = getattr(module, "bias", None)
        super().__init__(module.in_features, module.out_features, bias is not None, device="meta", dtype=dtype)
        self.weight.requires_grad_(False)
        if bias is not None:
            self.bias.requires_grad_(bias.requires_grad)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return nn.functional.linear(x, self.weight.to(x.dtype), bias)


def _is_quantised_linear(module: Any) -> bool:
    """Whether `module` is a leaf with the sizes of a linear whose weight is codes, or a tensor that wraps codes; not
    one whose weight is another kind of tensor (sharded, or one that dequantises itself)."""
    sizes: list[Any] = [getattr(module, name, None) for name in ("in_features", "out_features")]
    if not all(isinstance(size, int) for size in sizes) or next(module.children(), None) is not None:
        return False
    if type(module).forward is nn.Linear.forward and module.weight.is_floating_point():
        return False
    tensors: list[Any] = [each for each in tensors_in(vars(module)) if each.dim() > 0]
    wrapped: list[Any] = [tensor for tensor in tensors if is_traceable_wrapper_subclass(tensor)]
    plain = [tensor for tensor in tensors if not any(tensor is each for each in wrapped)]
    if any(tensor.is_floating_point() and tensor.numel() == prod(sizes) for tensor in plain):
        return False
    codes = [tensor for tensor in plain if not tensor.is_floating_point() and tensor.dtype is not torch.bool]
    return bool(codes) or any(not tensor.requires_grad for tensor in wrapped)


#: (storage, first byte): where a tensor begins.
Place = tuple[int, int]


def _meta_storages(tensors: Iterable[torch.Tensor]) -> dict[Place, torch.UntypedStorage]:
    """A meta storage for each group of tensors that overlap; tensors that only lie in one flat buffer are not tied."""
    ends: dict[Place, int] = {}
    sizes: dict[int, int] = {}
    for tensor in tensors:
        key, first = _place(tensor)
        reach = sum((n - 1) * stride for n, stride in zip(tensor.size(), tensor.stride(), strict=True)) + 1
        last = first + reach * tensor.element_size() * bool(tensor.numel())
        ends[key, first] = max(last, ends.get((key, first), 0))
        sizes[key] = tensor.untyped_storage().nbytes()
    found: dict[Place, torch.UntypedStorage] = {}
    before, end = None, 0
    for key, first in sorted(ends):
        if key != before or first >= end:
            storage = torch.empty(sizes[key], dtype=torch.uint8, device="meta").untyped_storage()
            end = 0
        found[key, first] = storage
        before, end = key, max(end, ends[key, first])
    return found


def _place(tensor: torch.Tensor) -> Place:
    return storage_id(tensor.untyped_storage()), int(tensor.storage_offset()) * tensor.element_size()


def _is_strided(tensor: torch.Tensor) -> bool:
    """Wrapper subclasses (quantised, distributed) have no strided storage of their own."""
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided


def _meta_twin(tensor: torch.Tensor, storages: dict[Place, torch.UntypedStorage]) -> torch.Tensor:
    if shape_of(tensor) != tensor.shape:
        twin = torch.empty(shape_of(tensor), dtype=tensor.dtype, device="meta")
    elif _is_strided(tensor):
        twin = torch.empty(0, dtype=tensor.dtype, device="meta")
        twin.set_(storages[_place(tensor)], tensor.storage_offset(), tensor.size(), tensor.stride())
    else:  # shape and dtype remain
        twin = torch.empty(tensor.size(), dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(twin, requires_grad=tensor.requires_grad)
    return twin.requires_grad_(tensor.requires_grad)
