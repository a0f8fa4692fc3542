"""The tolerance of the kernel tests: as accurate as PyTorch, against the truth in fp64. Nothing in it is tuned."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_as_accurate(ours: Tensor, reference: Tensor, truth: Tensor) -> None:
    """Fail unless the error of `ours` is at most 1.25 times that of `reference`, plus one rounding of the result.

    Args:
        ours, reference: what the kernel and PyTorch computed from the same inputs, in the same dtype.
        truth: the formula in fp64, from those very inputs.
    """
    assert ours.dtype == reference.dtype
    assert ours.shape == reference.shape == truth.shape
    if not truth.numel():
        return
    # Half a unit in the last place of each element, or of the smallest number that the dtype holds.
    info = torch.finfo(ours.dtype)
    rounding = (truth.abs() * (info.eps / 2)).clamp_min(info.smallest_normal * info.eps / 2)
    error, allowed = _rms(ours.double() - truth), 1.25 * _rms(reference.double() - truth) + _rms(rounding)
    assert error <= allowed, f"error {error:.3e}, allowed {allowed:.3e}"


def assert_same_special_values(ours: Tensor, *references: Tensor) -> None:
    """Fail unless every element is NaN, infinite or finite as in one of the references, which may differ in this."""
    agrees = torch.zeros_like(ours, dtype=torch.bool)
    for reference in references:
        alike = (ours.isnan() & reference.isnan()) | (ours == reference)
        agrees |= alike | (ours.isfinite() & reference.isfinite())
    assert agrees.all(), f"{ours[~agrees].tolist()} instead of {[r[~agrees].tolist() for r in references]}"


def _rms(tensor: Tensor) -> float:
    return float(tensor.square().mean().sqrt())
