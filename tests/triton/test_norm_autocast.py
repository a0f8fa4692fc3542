"""A norm without an affine whose x_hat is kept in 16 bits returns its output in the dtype of its input."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memopt.kernels.norm.forward_triton import launch_affine, launch_forward
from memopt.kernels.norm.reference import NormArguments, NormSpec
from tests.triton.conftest import DEVICE

BF16 = torch.bfloat16


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_the_output_is_wide_and_x_hat_is_its_cast(kind: Any) -> None:
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    arguments = NormArguments(NormSpec(kind, 1e-6), torch.float32, torch.float32, BF16)
    y, x_hat, _ = launch_forward(x, None, None, arguments)
    nothing, expected, _ = launch_forward(x, None, None, NormSpec(kind, 1e-6).in_dtype(torch.float32))
    assert nothing is None
    assert y is not None
    assert torch.equal(y, expected)
    assert torch.equal(x_hat, y.to(BF16))
    assert torch.equal(launch_affine(x_hat, None, None, arguments), x_hat.float())
