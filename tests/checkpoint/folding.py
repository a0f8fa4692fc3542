"""The writer's arithmetic on whole torch tensors, for tests: a tensor goes in as its bits and comes out of them."""

from __future__ import annotations

import numpy as np
import torch

from memopt.checkpoint import arithmetic
from memopt.checkpoint.arithmetic import Bits, Channels
from memopt.checkpoint.tiles import view3

NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64"}


def bits(tensor: torch.Tensor) -> Bits:
    """The stored bits of a tensor, in its shape."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return arithmetic.stored(raw, NAMES[tensor.dtype]).reshape(tensor.shape)


def tensor(stored: Bits, dtype: torch.dtype) -> torch.Tensor:
    """The tensor with these bits."""
    flat = torch.from_numpy(np.ascontiguousarray(stored).reshape(-1).view(np.uint8))
    return flat.view(dtype).reshape(stored.shape)


def round_once(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp64 `values` in `dtype`."""
    return tensor(arithmetic.encode(values.double().numpy(), NAMES[dtype]), dtype)


def scale_of(gamma: torch.Tensor, offset: int, size: int, channels: Channels = None) -> arithmetic.Floats:
    return arithmetic.fold_scale(gamma.double().numpy(), offset, size, channels)


def fold_weight(
    weight: torch.Tensor, gamma: torch.Tensor, offset: int = 0, axis: int = -1, channels: Channels = None
) -> torch.Tensor:
    """W diag(offset + gamma): `weight` with its coordinates along `axis` scaled."""
    axis %= weight.dim()
    size = weight.shape[axis]
    block = bits(weight).reshape(view3(tuple(weight.shape), axis))
    out = np.empty_like(block)
    arithmetic.Scaler(scale_of(gamma, offset, size, channels), NAMES[weight.dtype])(block, slice(0, size), out)
    return tensor(out, weight.dtype).reshape(weight.shape)


def fold_bias(
    bias: torch.Tensor, weight: torch.Tensor, beta: torch.Tensor, axis: int = -1, scale: float = 1.0
) -> torch.Tensor:
    """b + scale * W beta; `bias` has the shape of `weight` without `axis`, or a prefix of it."""
    axis %= weight.dim()
    shift = arithmetic.fold_shift(beta.double().numpy(), scale, weight.shape[axis])
    block = bits(weight).reshape(view3(tuple(weight.shape), axis))
    pair = arithmetic.contract(block, NAMES[weight.dtype], shift)
    flat = arithmetic.finish_bias(bits(bias).reshape(-1), NAMES[bias.dtype], arithmetic.per_output(pair, bias.numel()))
    return tensor(flat, bias.dtype).reshape(bias.shape)
