"""Temporary tensors inside PyTorch's operators on a CUDA device, which a trace of operators does not see.

Only temporaries that grow with the activations are counted. Their sizes are taken from the file that each rule names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

#: The shape and dtype of a temporary.
Temporary = tuple[tuple[int, ...], torch.dtype]
#: Rows of a tile of the attention kernels: row counts are rounded up to a multiple.
_FLASH_ROWS, _EFFICIENT_ROWS = 128, 64


def temporaries(func: Any, args: Any) -> Iterator[Temporary]:
    """The tensors that the operator `func` allocates beside its outputs and frees at the end of its call."""
    rule = _RULES.get(func.overloadpacket)
    return iter(()) if rule is None else rule(*args)


def _softmax_backward(gradient: Any, output: Any, *others: Any) -> Iterator[Temporary]:
    """``native/cuda/SoftMax.cu``: gradient * output; the fused masked softmax allocates none."""
    yield tuple(output.shape), torch.promote_types(gradient.dtype, output.dtype)


def _flash_backward(gradient: Any, query: Any, key: Any, value: Any, output: Any, *others: Any) -> Iterator[Temporary]:
    """``transformers/cuda/flash_attn/flash_api.cpp``, `mha_bwd`: row sums and dQ in fp32, dK and dV per query head.
    ``transformers/cuda/attention_backward.cu`` copies dO and O where their heads do not lie beside each other."""
    batch, heads, rows, width = query.shape
    for each in (gradient, output):
        if not each.transpose(1, 2).is_contiguous():
            yield tuple(each.shape), each.dtype
    rounded = _up(rows, _FLASH_ROWS)
    yield (batch, heads, rounded), torch.float32
    yield (batch, rounded, heads, _up(width, 32 if width <= 128 else 64)), torch.float32
    if key.shape[1] != heads:
        yield from [((batch, key.shape[2], heads, width), query.dtype)] * 2


def _efficient_backward(gradient: Any, query: Any, *others: Any) -> Iterator[Temporary]:
    """``transformers/cuda/attention_backward.cu`` and ``mem_eff_attention/kernel_backward.h``: row sums, dQ in fp32."""
    batch, heads, rows, width = query.shape
    yield (batch, heads, rows), torch.float32
    yield (batch, heads, _up(rows, _EFFICIENT_ROWS), _up(width, _EFFICIENT_ROWS)), torch.float32
    if query.dtype == torch.float32:
        yield tuple(query.shape), torch.float32  # the product of dO and O; for 16 bits the kernel computes it


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


_RULES: dict[Any, Callable[..., Iterator[Temporary]]] = {
    torch.ops.aten._softmax_backward_data: _softmax_backward,
    torch.ops.aten._scaled_dot_product_flash_attention_backward: _flash_backward,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward: _efficient_backward,
}
