"""Dropouts that a module's forward calls as functions, attention's dropout included: their masks come from seeds.

While such a module runs in train mode, a function mode replaces calls of `torch.nn.functional.dropout` and
`scaled_dot_product_attention`; other calls pass unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memopt.kernels.base.autograd import accumulation_dtype, autocast_as, autocast_dtype
from memopt.kernels.base.counter import draw_seed
from memopt.kernels.base.device import runs_triton
from memopt.kernels.dropout.function import seeded_dropout
from memopt.kernels.replay.function import replayed
from memopt.patches.compiled import is_being_compiled
from memopt.patches.dropout.module import OFF_WHERE_COMPILED, may_be_seeded
from memopt.patches.rerun import RepeatedMode
from memopt.torch_compat import calls_of_checkpointing, checkpointing_hook


def seeded_in_training(module: nn.Module, _: Sequence[Any]) -> AbstractContextManager[object]:
    """The context of one call of `module`, whose forward calls dropouts."""
    return seeded_functions() if module.training else nullcontext()


def seeded_functions() -> AbstractContextManager[object]:
    """Inside, dropouts called as functions save seeds, with and without gradients. Compiled code is unchanged."""
    if torch.compiler.is_compiling() and is_being_compiled(OFF_WHERE_COMPILED):
        return nullcontext()
    return _Seeded()


class _Seeded(RepeatedMode):
    def __enter__(self) -> Any:
        self._region = _region()
        return super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        run = _SEEDED.get(func)
        # A checkpointed region inside this context runs again without this mode, so its dropouts stay stock.
        if run is None or _region() != self._region:
            return func(*args, **kwargs)
        return run(*args, **kwargs)


def _region() -> tuple[object, ...]:
    """A value that is another one inside a checkpointed region: its hook, or that gradients are off (reentrant). If
    they are off already, a further region shows only in the number of running checkpoint functions."""
    recorded = torch.is_grad_enabled()
    return recorded, checkpointing_hook() if recorded else calls_of_checkpointing()


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or inplace or not 0 < p <= 1 or not may_be_seeded(input):
        return F.dropout(input, p, training, inplace)
    return seeded_dropout(input, p, draw_seed())


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    # GPU kernels save a seed themselves. For a mask together with `is_causal`, PyTorch raises its own error.
    as_it_is = query.is_cuda or runs_triton(query) or query.is_meta or (is_causal and attn_mask is not None)
    if not 0 < dropout_p <= 1 or as_it_is or not all(map(may_be_seeded, (query, key, value))):
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
    return seeded_attention(query, key, value, attn_mask, dropout_p, draw_seed(), is_causal=is_causal, **options)


_SEEDED: dict[Any, Callable[..., Tensor]] = {F.dropout: _dropout, F.scaled_dot_product_attention: _attention}


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

    def run(tensors: Sequence[Tensor], _: Sequence[Tensor]) -> Tensor:
        wide = accumulation_dtype(tensors[0].dtype)
        query, key, value = (tensor.to(wide) for tensor in tensors[:3])
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

    return replayed(run, [query, key, value, *([] if mask is None else [mask])], [])
