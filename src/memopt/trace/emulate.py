"""The choices of a CUDA device, for traces on fake CPU tensors: the attention kernel that runs, the tensors that
dropout saves, how long offloaded tensors stay.

Only choices that change saved tensors or the peak are imitated. The rules are PyTorch's own:
`sdp_utils.cpp` for the attention kernels, `Dropout.cpp` for the one-byte mask, `autocast_mode.h` for the operations
that run in fp32. memopt's operators take the code path of their Triton kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

from memopt.kernels.base.device import launches_emulated
from memopt.saved.host import copies_traced
from memopt.torch_compat import FakeTensor, TracingMode, known_values, no_dispatch, tree_map
from memopt.walk.models.plain import exchanged

_MAX_FLASH_HEAD = 256
_DROPOUT: frozenset[Any] = frozenset({F.dropout, torch.dropout})
_GROUPED = getattr(torch.ops.aten, "_grouped_mm", None)
#: Functions that autocast runs in fp32 on CUDA and not on the CPU, and whose output or input is saved.
_FP32_ON_CUDA: frozenset[Any] = frozenset(
    {F.layer_norm, F.group_norm, F.softmax, torch.softmax, Tensor.softmax, F.log_softmax, torch.log_softmax, F.softplus}
)


#: Functions that on CUDA read fp16 and write fp32 in one operation (``SoftMax.cpp``) -> that operation.
_OF_HALF: dict[Any, Any] = {
    **dict.fromkeys((F.softmax, torch.softmax, Tensor.softmax), torch.ops.aten._softmax),
    **dict.fromkeys((F.log_softmax, torch.log_softmax, Tensor.log_softmax), torch.ops.aten._log_softmax),
}
_CHOSEN = _DROPOUT | _FP32_ON_CUDA | _OF_HALF.keys() | {F.scaled_dot_product_attention}


class CudaChoices(TorchFunctionMode):
    """While active, attention, dropout and autocast save the tensors that they save on a CUDA device, and memopt's
    operators allocate the storages that they allocate there."""

    def __enter__(self) -> CudaChoices:
        self._others = contextlib.ExitStack()
        self._others.enter_context(launches_emulated())
        self._others.enter_context(copies_traced())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._others.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _CHOSEN:
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func in _DROPOUT:
            return _dropout(func, *args, **kwargs)
        if func in _OF_HALF and (output := _in_fp32(func, *args, **kwargs)) is not None:
            return output
        if func in _FP32_ON_CUDA and torch.is_autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):
                args, kwargs = tree_map(_to_fp32, (args, kwargs))
                return func(*args, **kwargs)
        return func(*args, **kwargs)


class AnyGroupedProduct(TracingMode):
    """While active, grouped products can be traced in every dtype: PyTorch's shape rule accepts bf16 only."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (grouped_product if is_grouped(func, args) else func)(*args, **(kwargs or {}))


def is_grouped(func: Any, args: Any) -> bool:
    """Whether `grouped_product` stands for this call of an operator."""
    return func.overloadpacket is _GROUPED and bool(args[0].dtype != torch.bfloat16)


def grouped_product(a: Tensor, b: Tensor, offs: Tensor | None = None, *others: Any, **options: Any) -> Tensor:
    """An empty result of `a` times `b` (2-d or 3-d); `offs` are the ends of the groups of rows, columns or summands."""
    size: tuple[int, ...] = (a.size(-2), b.size(-1))
    if a.dim() == b.dim():
        size = (b.size(0) if offs is None or b.dim() == 3 else offs.size(0), *size)
    return a.new_empty(size)


@contextlib.contextmanager
def unpadded_masks() -> Iterator[None]:
    """Inside, transformers skips the masks that it skips for a batch without packed rows and, unless a mask with known
    values has padding, without padding.

    In a trace, transformers itself skips no mask, because it cannot read masks and positions to look for those.
    """
    # transformers may read a mask whose values are known. The first releases of transformers 5 have no `is_tracing`.
    masking: Any = masking_utils
    stock, packed = getattr(masking, "is_tracing", None), masking.find_packed_sequence_indices
    others: dict[str, Any] = {
        "find_packed_sequence_indices": lambda positions: packed(positions) if _has_values(positions) else None
    }
    if stock is not None:
        others["is_tracing"] = lambda tensor=None: known_values(tensor) is None and stock(tensor)
    ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] = _mask
    try:
        with exchanged([(masking, name, value) for name, value in others.items()]):
            yield
    finally:
        del ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]  # the override alone


def has_padding(mask: object) -> bool:
    """Whether the values of a mask are known, and some token is masked."""
    values = known_values(mask) if isinstance(mask, FakeTensor) else mask
    if not isinstance(values, Tensor) or values.is_meta:
        return False
    with no_dispatch():
        return not values.all()


def _has_values(tensor: Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) or known_values(tensor) is not None


def _mask(
    *,
    kv_length: int,
    q_length: int | None = None,
    cache_position: Tensor | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    # The first releases of transformers 5 pass the positions of the queries, later ones their number.
    if cache_position is not None:
        kwargs["cache_position"] = cache_position
        q_length = cache_position.shape[0]
    else:
        kwargs["q_length"] = q_length
    skippable = (allow_is_causal_skip and q_length == kv_length) or allow_is_bidirectional_skip
    skippable = skippable and not has_padding(attention_mask)
    if skippable and (local_size is None or kv_length < local_size):
        return None
    # A mask that is not skipped has an entry for each row of the batch, because rows may differ in padding.
    mask: Tensor | None = sdpa_mask(
        kv_length=kv_length,
        local_size=local_size,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        **kwargs,
    )
    return mask


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (tensor.to(torch.get_autocast_dtype("cpu")) for tensor in (query, key, value))
    kernels = torch.ops.aten
    output: Tensor
    half = query.dtype in (torch.float16, torch.bfloat16)
    heads_match = query.shape[1] == key.shape[1]
    if query.dim() == 4 and half and attn_mask is None and query.shape[-1] == value.shape[-1] <= _MAX_FLASH_HEAD:
        flash = kernels._scaled_dot_product_flash_attention
        output, *_ = flash(query, key, value, dropout_p, is_causal, False, scale=scale)
    elif query.dim() == 4 and heads_match and query.dtype != torch.float64:
        efficient = kernels._scaled_dot_product_efficient_attention
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        output, *_ = efficient(query, key, value, bias, query.requires_grad, dropout_p, is_causal, scale=scale)
    else:
        output, _ = kernels._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )
    return output


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The additive bias that the memory-efficient kernel takes (it saves a boolean mask in this converted form)."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -torch.inf)
    return mask.to(query.dtype).expand(*query.shape[:2], query.shape[2], key.shape[2])


def _dropout(
    func: Callable[..., Tensor],
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    **names: Any,
) -> Tensor:
    training = names.get("train", training)
    if inplace or not training or not 0 < p < 1:
        return func(input, p, training)
    output, _ = torch.native_dropout(input, p, True)
    return output


def _in_fp32(func: Any, input: Tensor, dim: int | None = None, *others: Any, **names: Any) -> Tensor | None:
    """The softmax of an fp16 `input` with an fp32 result; None for any other call."""
    wanted = names.get("dtype", torch.float32 if torch.is_autocast_enabled("cpu") else None)
    dim = names.get("dim", dim)
    if input.dtype != torch.float16 or wanted != torch.float32 or dim is None or any(others):
        return None
    output: Tensor = _OF_HALF[func](input, dim, True)
    return output


def _to_fp32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
