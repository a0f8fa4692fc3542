"""Stand-ins for kernels of other packages, which cannot run in a trace; they save the tensors that the kernels save.

Temporary tensors inside a kernel are not counted, except those of FlashAttention and flex attention:

flash-attn 2.8, `csrc/flash_attn/flash_api.cpp`: PyTorch's flash attention is the same code, so its operator stands for
it; `memopt.trace.operations.temporaries` counts its temporaries. FlashAttention 3 is counted as 2.
PyTorch 2.13, `torch/_higher_order_ops/flex_attention.py`: saves its inputs, the output and fp32 sums of the rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from memopt.errors import ModelError
from memopt.walk.models.attention import FLASH
from memopt.walk.models.plain import STANDS_FOR_KERNEL, kernels_of

#: Python package -> its distribution, and the version whose code was read.
_READ = {
    "fla": ("flash-linear-attention", "version 0.6.0"),
    "mamba_ssm": ("mamba-ssm", "commit 01b717a"),
    "causal_conv1d": ("causal-conv1d", "commit 17f4f2f"),
}
_CHUNK = 64
"""Tokens in a chunk. For each token, one row of the chunk's triangular matrix is saved."""
_BLOCK = 128
"""Rows and columns of a block of flex attention's mask."""
_HINT = "Use another attention (--attention, or attention.implementation of the recipe)."
_MAX_HEAD = 256
"""The largest width of a head that FlashAttention takes."""


class _Kernel(torch.autograd.Function):
    """Returns and saves new tensors of (shape, dtype); in `saved`, n means the input of that index, ~n a result."""

    @staticmethod
    def forward(ctx: Any, returned: Sequence[Any], saved: Sequence[Any], *tensors: Tensor) -> Any:
        like = tensors[0]
        results = tuple(each and _new(like, *each) for each in returned)
        known = (*tensors, *reversed(results))
        ctx.save_for_backward(*(known[each] if isinstance(each, int) else _new(like, *each) for each in saved))
        ctx.forms = [(tensor.shape, tensor.dtype) for tensor in tensors]
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        like = next(each for each in gradients if each is not None)
        needs = ctx.needs_input_grad[2:]
        return (None, None, *(_new(like, *form) if need else None for form, need in zip(ctx.forms, needs, strict=True)))


def _new(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return like.new_empty(tuple(shape), dtype=dtype)


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """fla.ops.gated_delta_rule.chunk saves contiguous inputs, q and k normalised, and cumulative sums of g in fp32."""
    rows, tokens, heads, width = value.shape
    state = ((rows, heads, key.size(-1), width), torch.float32) if output_final_state else None
    roots = [(each.shape[:-1], torch.float32) for each in (query, key) if use_qk_l2norm_in_kernel]
    vectors = [
        place if each.is_contiguous() and not (use_qk_l2norm_in_kernel and place < 2) else (each.shape, each.dtype)
        for place, each in enumerate((query, key, value))
    ]
    saved = [*vectors, *roots, (g.shape, torch.float32), 4, ((rows, tokens, heads, _CHUNK), key.dtype)]
    returned = [(value.shape, query.dtype), state]
    result: tuple[Tensor, Tensor | None] = _Kernel.apply(returned, saved, query, key, value, g, beta)  # type: ignore[no-untyped-call]
    return result


def _delta_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_gate_in_kernel: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """fla.ops.kda.chunk saves two triangular matrices a head, and summed gates unless the kernel computes the gates."""
    vectors, last = _delta_rule(q, k, v, g[..., 0], beta, **options)
    rows, tokens, heads, _ = v.shape
    gates = [1] if use_gate_in_kernel else [1, (g.shape, torch.float32)]
    more = [each for each in (A_log, dt_bias) if each is not None]
    saved = [*gates, ((rows, tokens, heads, _CHUNK), k.dtype)]
    result: tuple[Tensor] = _Kernel.apply([(v.shape, q.dtype)], saved, vectors, g, *more)  # type: ignore[no-untyped-call]
    return result[0], last


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None = None, *others: Any, **options: Any) -> Tensor:
    """causal_conv1d.causal_conv1d_interface saves x and the weight; backward computes the activation again."""
    given = [each for each in (x, weight, bias) if each is not None]
    copied = x.stride(1) != 1 and x.stride(2) != 1
    saved = [(x.shape, x.dtype) if copied else 0, 1]
    channels_last = (x.transpose(1, 2).shape, x.dtype)
    (result,) = _Kernel.apply([channels_last], saved, *given)  # type: ignore[no-untyped-call]
    return result.transpose(1, 2)  # type: ignore[no-any-return]


def _split_scan(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    rmsnorm_weight: Tensor | None = None,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    **options: Any,
) -> Tensor:
    """mamba_ssm.ops.triton.ssd_combined saves a whole mixer's arguments, the scan's result and the norm's rstd."""
    rows, tokens, _ = zxbcdt.shape
    width = D.shape[0] * (headdim or D.shape[-1])
    weights = (conv1d_weight, conv1d_bias, dt_bias, A, D, rmsnorm_weight, outproj_weight, outproj_bias)
    given = [zxbcdt, *(each for each in weights if each is not None)]
    roots = [] if rmsnorm_weight is None else [((ngroups * rows * tokens,), torch.float32)]
    saved = [0, ((rows, tokens, width), zxbcdt.dtype), *roots, *range(1, len(given))]
    out = width if outproj_weight is None else outproj_weight.shape[0]
    (result,) = _Kernel.apply([((rows, tokens, out), zxbcdt.dtype)], saved, *given)  # type: ignore[no-untyped-call]
    return result  # type: ignore[no-any-return]


def _chunk_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor | None = None,
    dt_bias: Tensor | None = None, return_final_states: bool = False, **options: Any,
) -> Any:  # fmt: skip
    """mamba_ssm.ops.triton.ssd_combined saves its arguments, summed decays and its result."""
    rows, tokens, heads, width = x.shape
    given = [each for each in (x, dt, A, B, C, D, dt_bias) if each is not None]
    sums = ((rows, heads, -(-tokens // chunk_size), chunk_size), torch.float32)
    state = ((rows, heads, width, B.shape[-1]), torch.float32) if return_final_states else None
    result, last = _Kernel.apply([(x.shape, x.dtype), state], [*range(len(given)), sums, ~0], *given)  # type: ignore[no-untyped-call]
    return (result, last) if return_final_states else result


def _selective_scan(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, z: Tensor | None = None,
    delta_bias: Tensor | None = None, return_last_state: bool = False, **options: Any,
) -> Any:  # fmt: skip
    """mamba_ssm.ops.selective_scan_interface saves contiguous arguments, every 2048th state and the ungated result."""
    given = [each for each in (u, delta, B, C, z, A, D, delta_bias) if each is not None]
    saved = [
        at if each.dim() < 2 or each.stride(-1) == 1 else (each.shape, each.dtype) for at, each in enumerate(given)
    ]
    rows, channels, tokens = u.shape
    states = ((rows, channels, -(-tokens // 2048), 2 * A.shape[-1]), torch.float32)
    result = [] if z is None else [(u.shape, u.dtype)]
    state = ((rows, channels, A.shape[-1]), torch.float32) if return_last_state else None
    out, last = _Kernel.apply([(u.shape, u.dtype), state], [*saved, states, *result], *given)  # type: ignore[no-untyped-call]
    return (out, last) if return_last_state else out


#: Name of a kernel -> the function that replaces it while a step is traced.
STAND_INS: Mapping[str, Callable[..., Any]] = {
    "chunk_gated_delta_rule": _delta_rule,
    "chunk_kda": _delta_attention,
    "causal_conv1d_fn": _convolution,
    "mamba_split_conv1d_scan_combined": _split_scan,
    "mamba_chunk_scan_combined": _chunk_scan,
    "selective_scan_fn": _selective_scan,
}
for _function in STAND_INS.values():
    setattr(_function, STANDS_FOR_KERNEL, True)


def notes_of(model: nn.Module) -> list[str]:
    """Notes on the kernels that a trace of `model` assumes, and on kernels without a stand-in."""
    found = kernels_of(model)
    notes = []
    for package in dict.fromkeys(found.values()):
        name, version = _READ.get(package, (package, ""))
        known = [kernel for kernel, of in found.items() if of == package and kernel in STAND_INS]
        others = [kernel for kernel, of in found.items() if of == package and kernel not in STAND_INS]
        if known:
            notes.append(f"Assumes {name} for {', '.join(known)}: what it saves is that of {version}.")
        if others:
            notes.append(
                f"Of {name}, {', '.join(others)} would count as transformers' plain functions, which save more."
            )
    return notes


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
