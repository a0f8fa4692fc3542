"""Restores a model after a forward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


@contextlib.contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Restore modes, settings and buffers of every module, and torch's CPU generator, on leaving. A forward may write
    running statistics, grow rotary tables or lastingly shrink its windows to a small image. Attributes that a forward
    adds are not removed: hooks that transformers installs on the first call read them."""
    modules = list(model.modules())
    settings = [_settings(module) for module in modules]
    buffers = [_copy_buffers(module) for module in modules]
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for module, before, tensors in zip(modules, settings, buffers, strict=True):
            now = vars(module)
            # An attribute that was None is restored only if it is a tensor now (a cache).
            now.update({k: v for k, v in before.items() if v is not None or isinstance(now.get(k), torch.Tensor)})
            _restore_buffers(module, tensors)


def _settings(module: nn.Module) -> dict[str, Any]:
    kinds = (str, bool, int, float, tuple, torch.Tensor, type(None))
    return {name: value for name, value in vars(module).items() if isinstance(value, kinds)}


def _copy_buffers(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Name -> (buffer, copy of its values)."""
    return {
        name: (buffer, None if buffer is None or buffer.is_meta else buffer.clone())
        for name, buffer in module._buffers.items()
    }


@torch.no_grad()
def _restore_buffers(module: nn.Module, saved: dict[str, tuple[Any, Any]]) -> None:
    module._buffers.clear()
    for name, (buffer, values) in saved.items():
        module._buffers[name] = buffer
        if values is not None and buffer.shape == values.shape:
            buffer.copy_(values)
