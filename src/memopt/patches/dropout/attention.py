"""Attention with dropout that saves queries, keys, values and a seed, and recomputes its probabilities in backward.

    P = softmax(q k^T scale + mask)        y = (P * m / (1 - p)) v        m drawn by a generator that starts at the seed

For devices where PyTorch's fused attention has no dropout: there PyTorch's decomposition saves the probabilities, their
mask, their product, and fp32 copies of 16-bit queries, keys and values. GPU kernels save q, k, v and a seed themselves.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from memopt.kernels.base.autograd import accumulation_dtype, autocast_as, autocast_dtype
from memopt.kernels.replay.function import replayed


def seeded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    p: float,
    seed: int,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` with the probabilities dropped out by a seed.

    Args:
        query: (..., heads, L, E); key: (..., heads, S, E); value: (..., heads, S, Ev), floating point.
        mask: boolean, or added to the scores; broadcasts to (..., heads, L, S).
        p: probability of dropping an element, in (0, 1].
        seed: equal seeds give equal masks for equal shapes on one kind of device.

    Returns:
        (..., heads, L, Ev) in the dtype of the queries (autocast's where that is on). Computed in fp32 or wider. It
        can be differentiated once.
    """
    dtype = autocast_dtype(query)
    if dtype is not None and query.dtype != torch.float64:
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    run = functools.partial(_attended, p=p, seed=seed, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    return replayed(run, [query, key, value, *([] if mask is None else [mask])], [])


def _attended(
    tensors: Sequence[Tensor],
    _: Sequence[Tensor],
    *,
    p: float,
    seed: int,
    is_causal: bool,
    scale: float,
    enable_gqa: bool,
) -> Tensor:
    dtype = accumulation_dtype(tensors[0].dtype)
    query, key, value = (tensor.to(dtype) for tensor in tensors[:3])
    with autocast_as(None, query):
        if enable_gqa:
            groups = query.size(-3) // key.size(-3)
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        scores = query @ key.transpose(-2, -1) * scale
        for mask in tensors[3:]:
            scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, -math.inf)
        if is_causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(later, -math.inf)
        # A query without any key gives zeros, as in PyTorch's attention.
        empty = (scores == -math.inf).all(-1, keepdim=True)
        probabilities = scores.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)
        generator = torch.Generator(query.device).manual_seed(seed)
        factors = torch.empty_like(probabilities).bernoulli_(1 - p, generator=generator)
        if p < 1:
            factors = factors.div_(1 - p)
        return (probabilities * factors @ value).to(tensors[0].dtype)
