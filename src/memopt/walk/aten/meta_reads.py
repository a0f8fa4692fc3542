"""Forwards on meta tensors: values for the reads that they branch on, and a cache of the outputs of operations.

PyTorch computes the outputs of many meta operations in Python, at about 0.1 ms each; a model repeats the same few in
every layer. An output on meta is only a shape, strides and a dtype, and these follow from the arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from memopt.torch_compat import TorchDispatchMode, operator_schema, tree_leaves, tree_map
from memopt.walk.aten.parameters import storage_key
from memopt.walk.aten.rules import tensors_in

#: Operations that take a list of indices.
_INDEXED = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)
#: Types of arguments that may be part of a cache key.
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
#: Tests that are false for every finite number; those of `torch.isfinite` compare, and read as True.
_NOT_FINITE = frozenset({torch.ops.aten.isnan, torch.ops.aten.isinf, torch.ops.aten.isposinf, torch.ops.aten.isneginf})


class MetaReads(TorchDispatchMode):
    """Lets a forward read values of meta tensors and mix meta tensors with tensors on the CPU.

    A boolean ("is the whole mask set?") reads as True and a number as 1; two scalars are not equal, and all values are
    finite. ``nonzero`` returns every element, so that each expert of a mixture has tokens. An integer scalar that an
    operation returns is a 1 on the CPU, so that numbers computed from it have values. An operation with inputs on both
    devices runs on meta. With `keeps_values`, integer tensors with values (the sizes of images, say) stay on the CPU
    when the forward moves them to meta.
    """

    def __init__(self, *, keeps_values: bool = False) -> None:
        super().__init__()
        self._shapes = MetaShapes()
        self._keeps_values = keeps_values

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return True if args[0].dtype == torch.bool else 1
        if func is torch.ops.aten.equal.default and args[0].is_meta and not args[0].dim():
            return False  # torch.istft asks whether its window is too small
        if func is torch.ops.aten.nonzero.default and args[0].is_meta:
            return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
        if func.overloadpacket in _NOT_FINITE and args[0].is_meta:
            return torch.zeros(args[0].shape, dtype=torch.bool)
        if func is torch.ops.aten._to_copy.default:
            kwargs = self._where_it_is(args[0], kwargs or {})
        if func.overloadpacket in _INDEXED:
            args = (args[0], [place for index in args[1] for place in _places(index)], *args[2:])
        try:
            output = self._shapes.call(func, args, kwargs or {})
            return torch.ones_like(output, device="cpu") if _is_count(output) else output
        except RuntimeError:
            devices = {leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
            if devices != {"cpu", "meta"}:
                raise
            args, kwargs = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, (args, kwargs))
            return func(*args, **(kwargs or {}))

    def _where_it_is(self, source: torch.Tensor, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Options of a copy, less a change of device that needs values of a meta tensor or loses values of integers."""
        device = options.get("device")
        if device is None or device.type == source.device.type:
            return options
        needs_values = source.is_meta and (source.is_floating_point() or source.is_complex())
        loses_values = self._keeps_values and device.type == "meta" and not source.is_floating_point()
        return {**options, "device": source.device} if needs_values or loses_values else options


def _is_count(output: Any) -> bool:
    if not isinstance(output, torch.Tensor) or not output.is_meta or output.dim():
        return False
    return not (output.is_floating_point() or output.is_complex() or output.dtype == torch.bool)


def _places(index: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
    """Indices that select the elements that `index` selects; for a mask on meta, all elements."""
    if index is None or not index.is_meta or index.dtype != torch.bool:
        return (index,)
    return [index.new_empty(index.numel(), dtype=torch.int64)] * index.dim()


class MetaShapes:
    """Runs operations; the output of a repeated operation on meta tensors comes from a cache. Only operations that
    return one new tensor are cached: a view shares the storage of its input, and an in-place operation returns its
    input. For use under ``torch.no_grad``."""

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
    """The properties of an argument on which the output of an operation on meta can depend."""
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
    """Whether, by its schema, an operation returns one tensor that aliases no input, and mutates nothing."""
    schema = operator_schema(function)
    output = schema.returns[0] if len(schema.returns) == 1 else None
    return output is not None and not schema.is_mutable and str(output.type) == "Tensor" and output.alias_info is None


def _is_new(output: Any, inputs: tuple[Any, ...]) -> bool:
    """Whether the output has a storage of its own and no storage offset; schemas do not always show an alias."""
    if type(output) is not Tensor or not output.is_meta or output.storage_offset():
        return False
    return storage_key(output) not in map(storage_key, tensors_in(inputs))
