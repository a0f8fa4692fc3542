"""Operations on rows of a sampled linear: norms, the gather of saved rows, and the weight gradient from them.

    norm_i = |x_i|                                   the score of row i, or a factor of it
    kept_j = x[row_j]
    dW     = sum_j weight_j * dy[row_j]^T kept_j

`memopt.kernels.sampled_linear.sampling` chooses rows and weights. Rows of x are saved unscaled: the weights are applied
in fp32 to the k rows of dy that are read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.kernels.base.device import runs_triton
from memopt.kernels.base.precision import accumulation_dtype


def row_norms(x: Tensor) -> Tensor:
    """|x_i| of each row, fp32 (n,); fp64 for fp64.

    No square of a 16-bit or fp32 number overflows or underflows: only a row of zeros has norm 0, and only a norm beyond
    fp32 is infinite. NaN and infinity propagate. Triton reads x once and copies nothing.

    Args:
        x: (n, d), floating, any strides.
    """
    x = x.detach()
    if runs_triton(x):
        from memopt.kernels.sampled_linear.rows_triton import launch_row_norms

        return launch_row_norms(x)
    return _row_norms(x)


def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows], contiguous, in the dtype of x: (k, d).

    Args:
        x: (n, d), any strides.
        rows: int32 (k,), each in [0, n).
    """
    x = x.detach()
    if runs_triton(x):
        from memopt.kernels.sampled_linear.rows_triton import launch_gather_rows

        return launch_gather_rows(x, rows)
    return x.index_select(0, rows)


def sampled_weight_gradient(dy: Tensor, kept: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """sum_j weights_j * dy[rows_j]^T kept_j, (out, in) in the dtype of `kept`.

    weights_j * dy[rows_j] is computed in fp32 (fp64 for fp64) and rounded once to the dtype of `kept`; the sum over the
    rows is accumulated in fp32 (fp64). Triton reads the k rows of dy in place.

    Args:
        dy: (n, out), any strides.
        kept: (k, in), any strides.
        rows: int32 (k,), each in [0, n).
        weights: fp32 (k,).
    """
    dy, kept = dy.detach(), kept.detach()
    if runs_triton(dy, kept, weights):
        from memopt.kernels.sampled_linear.rows_triton import launch_weight_gradient

        return launch_weight_gradient(dy, kept, rows, weights)
    return _weight_gradient(dy, kept, rows, weights)


def _row_norms(x: Tensor) -> Tensor:
    # In fp64 the square of every 16-bit or fp32 number is exact and in range.
    norms: Tensor = torch.linalg.vector_norm(x, dim=1, dtype=torch.float64)
    return norms if x.dtype == torch.float64 else norms.to(torch.float32)


def _weight_gradient(dy: Tensor, kept: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    precision = accumulation_dtype(kept.dtype)
    scaled = dy.index_select(0, rows).to(precision) * weights.to(precision)[:, None]
    return scaled.to(kept.dtype).t() @ kept
