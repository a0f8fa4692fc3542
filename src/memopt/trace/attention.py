"""Stand-ins for FlashAttention and flex attention, which run on a GPU only: they save and allocate what the kernels do.

flash-attn 2.8, `csrc/flash_attn/flash_api.cpp`: PyTorch's flash attention is the same code, so its operator stands for
it; `memopt.trace.operations.temporaries` counts its temporaries. FlashAttention 3 is counted as 2.
PyTorch 2.13, `torch/_higher_order_ops/flex_attention.py`: saves its inputs, the output and fp32 sums of the rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from memopt.errors import ModelError
from memopt.walk.models.attention import FLASH

_BLOCK = 128
"""Rows and columns of a block of flex attention's mask."""
_HINT = "Use another attention (--attention, or attention.implementation of the recipe)."
_MAX_HEAD = 256
"""The largest width of a head that FlashAttention takes."""


@contextlib.contextmanager
def attention_traced() -> Iterator[None]:
    """Inside, a model that is set to FlashAttention or flex attention calls a stand-in."""
    functions = {**dict.fromkeys(FLASH, _flash), "flex_attention": _flex}
    for name, function in functions.items():
        ALL_ATTENTION_FUNCTIONS[name] = function
    ALL_MASK_ATTENTION_FUNCTIONS["flex_attention"] = _mask
    try:
        yield
    finally:
        for name in functions:
            del ALL_ATTENTION_FUNCTIONS[name]  # the override alone
        del ALL_MASK_ATTENTION_FUNCTIONS["flex_attention"]


def _flash(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """``transformers/integrations/flash_attention.py``: 16-bit tensors, values as wide as the queries."""
    if query.dtype == torch.float32 or torch.is_autocast_enabled("cpu"):
        query, key, value = _low(query, key, value)
    if query.shape[-1] > _MAX_HEAD:
        raise ModelError(f"FlashAttention takes heads of a width up to {_MAX_HEAD}, not {query.shape[-1]}.", _HINT)
    width = value.shape[-1]
    value = F.pad(value, (0, query.shape[-1] - width)) if width != query.shape[-1] else value
    causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    output, *_ = flash(query, key, value, dropout, causal, False, scale=scaling)
    return output.transpose(1, 2)[..., :width], None


def _flex(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    s_aux: Tensor | None = None, **others: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``transformers/integrations/flex_attention.py``, with its copies of shared heads and its sinks."""
    if dropout:
        raise ModelError("Flex attention has no dropout, and the config has one for attention.", _HINT)
    heads = query.shape[1]
    if heads & (heads - 1):  # not a power of 2
        key, value = (each.repeat_interleave(heads // each.shape[1], 1) for each in (key, value))
    three = _low(query, key, value) if torch.is_autocast_enabled("cpu") else (query, key, value)
    output, sums = _FlexFunction.apply(*three)  # type: ignore[no-untyped-call]
    if s_aux is not None:
        sums = sums.to(value.dtype).unsqueeze(-1)
        sinks = s_aux.view(1, -1, 1, 1).expand(sums.shape)
        output = (output * (sums - torch.cat([sums, sinks], -1).logsumexp(-1, keepdim=True)).exp()).to(query.dtype)
    return output.transpose(1, 2).contiguous(), sums


def _low(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(each.to(torch.get_autocast_dtype("cpu")) for each in tensors)


class _FlexFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        # Below autograd, the operator of another kernel stands for this one: `checkpointing.keep` knows it by its name.
        output, sums, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)
        ctx.save_for_backward(query, key, value, output, sums)
        return output, sums

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, of_sums: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, output, sums = ctx.saved_tensors
        products = torch.empty_like(sums)  # of the output and its gradient, summed over each row
        found: tuple[Tensor, Tensor, Tensor] = _flex_backward(gradient, query, key, value, output, products)
        return found


def _gradients(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, products: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


_flex_backward = torch.library.custom_op("memopt::flex_attention_backward", _gradients, mutates_args=())
_flex_backward.register_fake(_gradients)


@register_flop_formula(torch.ops.memopt.flex_attention_backward)
def _flops(gradient: Any, query: Any, key: Any, *others: Any, **names: Any) -> int:
    """Five products of queries x keys, as in `torch.utils.flop_counter.sdpa_backward_flop_count`."""
    batch, heads, rows, width = query
    return int(5 * 2 * batch * heads * rows * key[-2] * width)


def _mask(*, batch_size: int, kv_length: int, q_length: int | None = None, **others: Any) -> Tensor:
    """The tensors of a `BlockMask` that grow with its blocks: columns and rows of partial and of full blocks."""
    rows = kv_length if q_length is None else q_length  # the first releases of transformers 5 pass no `q_length`
    return torch.empty((4, batch_size, 1, -(-rows // _BLOCK), -(-kv_length // _BLOCK)), dtype=torch.int32)
