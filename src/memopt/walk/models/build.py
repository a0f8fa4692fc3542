"""Models to walk: the real shape on meta tensors, and the meta copy of a live model. No weights are ever read."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from memopt.partitioned import shape_of
from memopt.torch_compat import storage_id
from memopt.walk.models.instantiate import instantiate
from memopt.walk.models.limits import watched_build


def build_meta(config: PreTrainedConfig, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The model of `config` in its real shape on the meta device: every name and shape, no memory, eval mode.

    `dtype` defaults to the config's. Attention is SDPA, eager where the class refuses that.
    Experts run as one batched product, because their eager loop branches on values, which meta tensors lack.

    Raises:
        ModelError: transformers has no class for the config, or the class cannot be built from it.
    """
    with watched_build():
        model = instantiate(config, device="meta", dtype=dtype, experts_implementation="batched_mm")
    # Some constructors of parameters ignore the default device.
    nn.Module.to(model, "meta")
    model.eval()
    return model


def clone_to_meta(model: nn.Module) -> nn.Module:
    """A structural copy of `model` with every tensor on meta: no storage is copied or allocated.

    Names, ties (also views of one storage), dtypes, strides, ``requires_grad`` and hooks are those of `model`;
    gradients are dropped. Works for any module, wrapped (PEFT) or not.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    # deepcopy looks every object up in the memo first, so a tensor found there is replaced and never copied.
    memo: dict[int, Any] = {id(tensor): _meta_twin(tensor, storages) for tensor in _tensors_of(model)}
    return copy.deepcopy(model, memo)


def _tensors_of(model: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters, buffers, and tensors that modules hold as plain attributes (also in lists, tuples and dicts)."""
    for module in model.modules():
        for value in vars(module).values():
            yield from _tensors_in(value)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)


def _meta_twin(tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    if shape_of(tensor) != tensor.shape:
        twin = torch.empty(shape_of(tensor), dtype=tensor.dtype, device="meta")
    elif type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided:
        source = tensor.untyped_storage()
        key = storage_id(source)
        if key not in storages:
            storages[key] = torch.empty(source.nbytes(), dtype=torch.uint8, device="meta").untyped_storage()
        twin = torch.empty(0, dtype=tensor.dtype, device="meta")
        twin.set_(storages[key], tensor.storage_offset(), tensor.size(), tensor.stride())
    else:  # Wrapper subclasses (quantised, distributed) have no strided storage of their own; shape and dtype remain.
        twin = torch.empty(tensor.size(), dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(twin, requires_grad=tensor.requires_grad)
    return twin.requires_grad_(tensor.requires_grad)
