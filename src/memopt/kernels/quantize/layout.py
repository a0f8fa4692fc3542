"""The layout of a quantised tensor: groups, codes and scales. Nothing here imports Triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Elements that share a minimum and a step.
GROUP = 128


@dataclass(frozen=True, eq=False)
class Quantized:
    """The result of :func:`memopt.kernels.quantize.quantize.quantize`."""

    codes: Tensor
    """uint8, (ceil(numel * bits / 8),). With 4 bits, element i is in byte i // 2 at bits 4 * (i % 2)."""
    scales: Tensor
    """(ceil(numel / GROUP), 2): minimum and step of each group. fp32, and fp64 for an fp64 tensor."""
    bits: int
    numel: int
    dtype: torch.dtype
    """That of the original."""
