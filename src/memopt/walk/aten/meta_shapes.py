"""A cache of the outputs of operations on meta tensors.

PyTorch computes the outputs of many meta operations in Python, at about 0.1 ms each; a model repeats the same few in
every layer. An output on meta is only a shape, strides and a dtype, and these follow from the arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from memopt.torch_compat import operator_schema
from memopt.walk.aten.parameters import storage_key
from memopt.walk.aten.rules import tensors_in

#: Types of arguments that may be part of a cache key.
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class MetaShapes:
    """Runs operations; the output of one on meta tensors that it has seen before comes from the cache.

    Only operations that return one new tensor are cached: a view shares the storage of its input, and an in-place
    operation returns its input. For use under ``torch.no_grad``.
    """

    def __init__(self) -> None:
        self._outputs: dict[Any, tuple[Any, ...]] = {}

    def call(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Output of an aten overload."""
        if not _makes_one(function):
            return function(*args, **kwargs)
        try:
            key = (function, _form(args), *((name, _form(value)) for name, value in kwargs.items()))
        except _Incomparable:
            return function(*args, **kwargs)
        if (known := self._outputs.get(key)) is not None:
            shape, strides, dtype = known
            return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        output = function(*args, **kwargs)
        if _is_new(output, (*args, *kwargs.values())):
            self._outputs[key] = (output.shape, output.stride(), output.dtype)
        return output


class _Incomparable(Exception):
    """An argument is neither a meta tensor nor plain data."""


def _form(value: Any) -> Any:
    """What the output of an operation on meta can depend on in an argument."""
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, nn.Parameter) or not value.is_meta or value.is_conj() or value.is_neg():
            raise _Incomparable
        return (value.shape, value.stride(), value.dtype)
    if isinstance(value, (list, tuple)):
        return tuple(map(_form, value))
    if isinstance(value, _PLAIN):
        return (type(value), value)  # 1, 1.0 and True are equal, and promote differently
    raise _Incomparable


@functools.cache
def _makes_one(function: Any) -> bool:
    """Whether its schema says that an operation returns one tensor, which aliases no input, and mutates nothing."""
    schema = operator_schema(function)
    output = schema.returns[0] if len(schema.returns) == 1 else None
    return output is not None and not schema.is_mutable and str(output.type) == "Tensor" and output.alias_info is None


def _is_new(output: Any, inputs: tuple[Any, ...]) -> bool:
    """Whether the output has a storage of its own, which schemas do not always tell, and no storage offset."""
    if type(output) is not Tensor or not output.is_meta or output.storage_offset():
        return False
    return storage_key(output) not in map(storage_key, tensors_in(inputs))
