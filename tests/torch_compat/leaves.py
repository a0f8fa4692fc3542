"""Tensors that the canaries of PyTorch's private names share."""

from __future__ import annotations

import torch
from torch import Tensor


def leaf(*size: int) -> Tensor:
    return torch.rand(size or (3,), requires_grad=True)
