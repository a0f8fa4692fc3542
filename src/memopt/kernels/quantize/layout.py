"""The layout of a quantised tensor: groups, codes and scales. Nothing here imports Triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Elements that share a minimum and a step.
GROUP = 128
#: The largest code.
LEVELS = 255


@dataclass(frozen=True, eq=False)
class Quantized:
    """The result of :func:`memopt.kernels.quantize.quantize.quantize`."""

    codes: Tensor
    """uint8, one for each element."""
    scales: Tensor
    """(ceil(elements / GROUP), 2): minimum and step of each group. fp32, and fp64 for an fp64 tensor."""
    dtype: torch.dtype
    """The dtype of the original tensor."""
