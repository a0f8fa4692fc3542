"""The dtype in which the operators compute."""

from __future__ import annotations

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics and sums of tensors of `dtype`: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
