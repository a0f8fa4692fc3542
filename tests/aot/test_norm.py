"""What the compiler must not make of the norms' kernels."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from memopt.kernels.norm.forward_triton import launch_affine, launch_forward
from memopt.kernels.norm.function import NormSpec
from tools.kernels.aot import capture


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_rounded_product_is_not_fused_with_the_sum(dtype: torch.dtype) -> None:
    """With cast "before", a 16-bit product is rounded before the bias is added; one fused operation rounds once."""
    spec = NormSpec("layer", 1e-5, cast="before")

    def meta(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    with capture("sm_90") as binaries:
        launch_affine(meta(64, 1024), meta(1024), meta(1024), spec.in_dtype(dtype))
        launch_forward(meta(64, 1024), meta(1024), meta(1024), spec.in_dtype(dtype))
        launch_forward(meta(64, 20000), meta(20000), meta(20000), spec.in_dtype(dtype))
    assert len(binaries) == 3
    for binary in binaries:
        assert not re.findall(r"fma[\w.]*\.b?f16", binary.asm["ptx"]), binary.kernel
