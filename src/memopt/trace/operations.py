"""What the operations of a step compute and move: FLOPs and bytes, counted where they run.

A product that runs again in backward is counted twice. Bytes are what an operation reads and writes, each operand once.
Fused kernels move less than the operations that they replace.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Size, Tensor
from torch.utils.flop_counter import flop_registry

from memopt.torch_compat import FakeTensor, is_operator, operator_schema, storage_id
from memopt.trace.storages import storages, tensors

#: Operations that read of their operands as much as they write.
_GATHERS = frozenset({"embedding", "index_select", "gather", "index"})
#: Allocations that read nothing of their operand. `empty_like` stands for a kernel of ours that reads it: on fake
#: tensors none is launched.
_ALLOCATIONS = frozenset({"new_empty"})


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a step."""

    moment: int
    """How many storages had been allocated or freed before it."""
    flops: int
    """Of products and attention; 0 elsewhere."""
    itemsize: int
    """Bytes of an element of its first operand."""
    nbytes: int
    """Read and written."""
    copied: int = 0
    """Bytes that go to the memory of the host or come from it."""

    def at(self, moment: int) -> Operation:
        """The same at another moment."""
        return Operation(moment, self.flops, self.itemsize, self.nbytes, self.copied)


def operation(func: Any, args: Any, kwargs: Any, result: Any, moment: int) -> Operation | None:
    """What one call of an operator costs; None for a view, and for what has no operands."""
    outputs = list(tensors(result))
    inputs = list(tensors((args, kwargs))) if outputs and is_operator(func) else []
    if not inputs:
        return None
    schema = operator_schema(func)
    if not schema.is_mutable and _addresses(outputs) <= _addresses(inputs):
        return None
    name = schema.name.rpartition("::")[2]
    written = sum(map(_nbytes, outputs))
    read = written if name in _GATHERS else sum(map(_nbytes, inputs)) - sum(map(_nbytes, tensors(kwargs.get("out"))))
    read = 0 if name in _ALLOCATIONS else read
    devices = {_device(tensor) for tensor in (*inputs, *outputs) if tensor.dim()}
    copied = _nbytes(outputs[0]) if len(devices) > 1 else 0
    return Operation(moment, _flops(func, name, args, kwargs, result), inputs[0].itemsize, read + written, copied)


def _flops(func: Any, name: str, args: Any, kwargs: Any, result: Any) -> int:
    count = flop_registry.get(func.overloadpacket)
    if count is not None:
        args = args[:3] if name == "addmm" else args  # the formula takes a fourth, the result's dtype, for its shape
        return int(count(*_with_all_heads(name, args), **kwargs, out_val=result))
    if "grouped_mm" in name and isinstance(args[1], Tensor):
        # Each row of the first operand meets one matrix of the second; both may be the grouped one (dW).
        rows, shared = args[0].shape[-2:]
        return int(2 * rows * shared * args[1].shape[-1])
    return 0


def _with_all_heads(name: str, args: Any) -> Any:
    """The arguments of attention with as many heads of keys and values as queries have.

    Formulas of PyTorch before 2.13 fail where several heads of queries share one.
    """
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
    """Of its elements; an expanded tensor has those of its storage."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
