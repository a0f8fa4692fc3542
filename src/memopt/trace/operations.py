"""The FLOPs of the operations of a step and the bytes that they read and write, counted during the trace.

A product that runs again in backward is counted twice. Each operand of an operation is read or written once.
Fused kernels move less than the operations that they replace. Of the temporary tensors inside PyTorch's operators on a
CUDA device, which a trace of operators does not see, those that grow with the activations are counted; their sizes are
taken from the file that each rule names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Size, Tensor
from torch.utils.flop_counter import flop_registry

from memopt.torch_compat import FakeTensor, is_operator, operator_schema, storage_id
from memopt.trace.storages import storages
from memopt.walk.aten.rules import tensors_in

#: Operations that read only as many bytes of their operands as they write.
_GATHERS = frozenset({"embedding", "index_select", "gather", "index"})
#: Allocations that do not read their operand. `empty_like` is left out: on fake tensors it stands for one of memopt's
#: kernels, which reads the operand and is not launched.
_ALLOCATIONS = frozenset({"new_empty"})
#: The shape and dtype of a temporary.
Temporary = tuple[tuple[int, ...], torch.dtype]
#: Rows of a tile of the attention kernels: row counts are rounded up to a multiple.
_FLASH_ROWS, _EFFICIENT_ROWS = 128, 64


class Operation(NamedTuple):
    """One operation of a step."""

    moment: int
    """How many storages had been allocated or freed before it."""
    flops: int
    """FLOPs of a product or of attention; 0 for other operations."""
    itemsize: int
    """Bytes per element of its first operand; of a product, of its first factor."""
    nbytes: int
    """Bytes read and written."""
    copied: int = 0
    """Bytes copied between host and device memory."""

    def at(self, moment: int) -> Operation:
        """A copy of this operation at another moment, made without a call of Python: traces copy millions."""
        return tuple.__new__(Operation, (moment, *self[1:]))


def operation(func: Any, args: Any, kwargs: Any, result: Any, moment: int) -> Operation | None:
    """The cost of one call of an operator; None for a view, and for an operator without tensors as operands."""
    outputs = list(tensors_in(result))
    inputs = list(tensors_in((args, kwargs))) if outputs and is_operator(func) else []
    if not inputs:
        return None
    schema = operator_schema(func)
    if not schema.is_mutable and _addresses(outputs) <= _addresses(inputs):
        return None
    name = schema.name.rpartition("::")[2]
    written = sum(map(_nbytes, outputs))
    read = written if name in _GATHERS else sum(map(_nbytes, inputs)) - sum(map(_nbytes, tensors_in(kwargs.get("out"))))
    read = 0 if name in _ALLOCATIONS else read
    devices = {_device(tensor) for tensor in (*inputs, *outputs) if tensor.dim()}
    copied = _nbytes(outputs[0]) if len(devices) > 1 else 0
    # The first operand of these is added to the product, in fp32 where a gradient is summed up.
    factor = inputs[1 if name in ("addmm", "baddbmm", "addbmm", "addmv") and len(inputs) > 1 else 0]
    return Operation(moment, _flops(func, name, args, kwargs, result), factor.itemsize, read + written, copied)


def _flops(func: Any, name: str, args: Any, kwargs: Any, result: Any) -> int:
    count = flop_registry.get(func.overloadpacket)
    if count is not None:
        args = args[:3] if name == "addmm" else args  # the formula would take a fourth, the result's dtype, for a shape
        return _counted(count, *_with_all_heads(name, args), **kwargs, out_val=result)
    if "grouped_mm" in name and isinstance(args[1], Tensor):
        # Each row of the first operand is multiplied by one matrix of the second; in dW both operands are grouped.
        rows, shared = args[0].shape[-2:]
        return int(2 * rows * shared * args[1].shape[-1])
    return 0


#: (formula, its arguments with shapes in place of tensors) -> FLOPs. A formula is slow: it flattens its arguments.
_known: dict[Any, int] = {}


def _counted(count: Callable[..., int], *args: Any, **kwargs: Any) -> int:
    if not hasattr(count, "__wrapped__"):  # it reads the tensors (`get_raw`); others get their shapes alone
        return int(count(*args, **kwargs))
    form = (count, *kwargs, _shapes((args, *kwargs.values())))
    if form not in _known:
        _known[form] = int(count(*args, **kwargs))
    return _known[form]


def _shapes(value: Any) -> Any:
    return tuple(map(_shapes, value)) if isinstance(value, list | tuple) else getattr(value, "shape", value)


def _with_all_heads(name: str, args: Any) -> Any:
    """The arguments of attention with as many heads of keys and values as queries have. Formulas of PyTorch before 2.13
    fail where several heads of queries share one."""
    if not name.startswith("_scaled_dot_product"):
        return args
    at = 1 if name.endswith("_backward") else 0
    query, *shared = args[at : at + 3]
    every = (Size((*each.shape[:-3], query.shape[-3], *each.shape[-2:])) for each in shared)
    return (*args[: at + 1], *every, *args[at + 3 :])


def _addresses(those: list[Tensor]) -> set[int]:
    return {storage_id(storage) for storage in storages(those)}


def _device(tensor: Tensor) -> str:
    # A fake tensor dispatches `device`.
    return (tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device).type


def _nbytes(tensor: Tensor) -> int:
    """Bytes of the elements of `tensor`; for an expanded tensor, bytes of its storage."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


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
