"""Group-wise 8-bit quantisation of saved tensors.

    code = floor((x - low) / step + u)      low = min(x)
       x ~ low + code * step                step = (max(x) - low) / 255

with one `low` and `step` for each group of 128 consecutive elements, so that an outlier widens only its own group. u is
uniform in [0, 1): stochastic rounding is unbiased, up to the rounding of the arithmetic. The method is Mesa's
(https://arxiv.org/abs/2111.11124), with the tensor's own range in place of a running range.

The PyTorch reference here and the Triton kernels give the same bytes: the same roundings in the same order.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from memopt.kernels.base.autograd import accumulation_dtype
from memopt.kernels.base.counter import uniform
from memopt.kernels.base.device import runs_triton, skips_pieces
from memopt.kernels.quantize.layout import GROUP, LEVELS, Quantized

#: Most and least elements that the reference quantises at a time, and the number of parts of a tensor between these
#: limits. It has about forty bytes of temporaries for each element.
_CHUNK, _LEAST_CHUNK, _CHUNKS = 2**20, 2**15, 64
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def quantize(x: Tensor, seed: int) -> Quantized:
    """Quantise `x`.

    A group with a NaN or an infinity, or a range beyond fp32 (for fp64, beyond fp64), dequantises to NaN as a whole. A
    constant group dequantises to itself.

    Args:
        x: fp16, bf16, fp32 or fp64, one-dimensional and contiguous.
        seed: seed of the stochastic rounding; equal seeds give equal codes.

    Raises:
        ValueError: `x` has another dtype, several dimensions, or is not contiguous.
    """
    if x.dtype not in _DTYPES or x.dim() != 1 or not x.is_contiguous():
        raise ValueError(
            f"x must be one-dimensional, contiguous and fp16, bf16, fp32 or fp64, "
            f"not {x.dtype} of shape {tuple(x.shape)} with strides {x.stride()}"
        )
    x = x.detach()
    if runs_triton(x):
        from memopt.kernels.quantize.quantize_triton import launch_quantize

        codes, scales = launch_quantize(x, seed)
    else:
        codes, scales = _quantize(x, seed)
    return Quantized(codes, scales, x.dtype)


def dequantize(quantized: Quantized) -> Tensor:
    """The values of the codes: one dimension, in the dtype of the original.

    minimum + code * step in fp32 (fp64 for fp64), rounded once to the dtype.
    """
    if runs_triton(quantized.scales):
        from memopt.kernels.quantize.quantize_triton import launch_dequantize

        return launch_dequantize(quantized.codes, quantized.scales, quantized.dtype)
    return _dequantize(quantized.codes, quantized.scales, quantized.dtype)


def _quantize(x: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    codes = x.new_empty(x.numel(), dtype=torch.uint8)
    scales = x.new_empty(-(-x.numel() // GROUP), 2, dtype=accumulation_dtype(x.dtype))
    if skips_pieces(x):
        return codes, scales  # as with Triton kernels, nothing else is allocated
    chunk = _chunk_of(x.numel())
    for start in range(0, x.numel(), chunk):
        part = x[start : start + chunk]
        groups = pad(part, (0, -part.numel() % GROUP)).view(-1, GROUP).to(scales.dtype)
        inside = torch.arange(groups.numel(), device=x.device).view_as(groups) < part.numel()
        low, step = _range(groups, inside)
        scales[start // GROUP : start // GROUP + len(groups)] = torch.cat((low, step), 1)
        codes[start : start + part.numel()] = _encode(groups, low, step, start, seed).view(-1)[: part.numel()]
    return codes, scales


def _chunk_of(numel: int) -> int:
    """Elements at a time, in whole groups; few, since drawing takes several 64-bit integers for each element."""
    return min(max(numel // _CHUNKS, _LEAST_CHUNK), _CHUNK) // GROUP * GROUP


def _dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    x = codes.new_empty(codes.numel(), dtype=dtype)
    if skips_pieces(codes):
        return x
    chunk = _chunk_of(codes.numel())
    for start in range(0, codes.numel(), chunk):
        part = x[start : start + chunk]
        groups = pad(codes[start : start + chunk], (0, -part.numel() % GROUP)).view(-1, GROUP).to(scales.dtype)
        low, step = scales[start // GROUP : start // GROUP + len(groups)].split(1, dim=1)
        part.copy_((low + groups * step).view(-1)[: part.numel()])
    return x


def _range(groups: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
    """Minimum and step of each row, (rows, 1) each. The step is NaN where the row cannot be quantised."""
    finite = groups.isfinite()
    counted = inside & finite
    low = groups.where(counted, torch.inf).amin(1, keepdim=True)
    high = groups.where(counted, -torch.inf).amax(1, keepdim=True)
    # The minimum of 0 and -0 may be either of them: make both 0.
    low, high = low.where(low != 0, 0.0), high.where(high != 0, 0.0)
    # Divide by a tensor: for a number, CUDA multiplies by its reciprocal.
    step = (high - low) / torch.full_like(low, LEVELS)
    sound = (finite | ~inside).all(1, keepdim=True) & (low + LEVELS * step).isfinite()
    return low, step.where(sound, torch.nan)


def _encode(groups: Tensor, low: Tensor, step: Tensor, start: int, seed: int) -> Tensor:
    """Codes of each row as uint8; `start` is the index of the first element."""
    # Comparisons with NaN are false: the code is then 0, as in a constant row.
    position = torch.where(step > 0, (groups - low) / step, 0.0)
    below = position.floor()
    index = torch.arange(start, start + groups.numel(), device=groups.device).view_as(groups)
    # Distributed as floor(position + u), without the rounding of that sum.
    up = uniform(index, seed) < position - below
    # Rounding may put the quotient of the largest element above LEVELS.
    return (below + up).clamp(0, LEVELS).to(torch.uint8)
