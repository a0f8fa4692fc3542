"""Parameters that DeepSpeed's ZeRO-3 has partitioned: empty here but for the time that they are gathered."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn


def shape_of(tensor: torch.Tensor) -> torch.Size:
    """The shape of `tensor`, of a partitioned parameter that of the whole."""
    return torch.Size(getattr(tensor, "ds_shape", tensor.shape))


def gathered(module: nn.Module) -> AbstractContextManager[Any]:
    """Inside, the partitioned parameters of `module` are whole; every rank has to enter it for the same module."""
    parts = [p for p in module.parameters() if hasattr(p, "ds_id")]
    deepspeed: Any = sys.modules.get("deepspeed")
    return deepspeed.zero.GatheredParameters(parts) if parts and deepspeed else nullcontext()
