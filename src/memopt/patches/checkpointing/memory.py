"""The memory of a tensor that is kept for backward: which operators write into it, and who else refers to it.

Version counters do not say it: an alias that an operator made (``aten::_unsafe_view``) has a counter of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memopt.torch_compat import (
    is_operator,
    is_traceable_wrapper_subclass,
    living_storage,
    operator_schema,
    storage_id,
    storage_use_count,
    tree_leaves,
    weak_storage,
)


class Memory:
    """The storages of a tensor, which this object does not keep alive."""

    def __init__(self, tensor: Tensor) -> None:
        found = list(_storages(tensor))
        self.ids = frozenset(map(storage_id, found))
        self._storages = [weak_storage(each) for each in found]

    def owners(self) -> float:
        """How many tensors and other objects refer to the storages."""
        alive = [storage for each in self._storages if (storage := living_storage(each)) is not None]
        return sum(storage_use_count(storage_id(storage)) - 1 for storage in alive)  # one is `storage` itself


def written_by(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> frozenset[int]:
    """The :func:`storage_id` of each storage that the call may write into."""
    places = _places_written(function)
    if places is None:
        tree: Any = args, kwargs
    else:
        tree = [args[at] if at < len(args) else kwargs.get(name) for at, name in places]
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)) if tree else ()
    return frozenset(storage_id(storage) for tensor in tensors for storage in _storages(tensor))


@functools.cache
def _places_written(function: Any) -> tuple[tuple[int, str], ...] | None:
    """Position and name of each argument that an operator writes into; None if it has no schema that says so."""
    if not is_operator(function):
        return None
    arguments = enumerate(operator_schema(function).arguments)
    return tuple((at, each.name) for at, each in arguments if each.alias_info is not None and each.alias_info.is_write)


def _storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    wrapper: Any = tensor
    if type(tensor) is not Tensor and is_traceable_wrapper_subclass(wrapper):
        inner = [getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0]]
        for each in inner:
            if isinstance(each, Tensor):
                yield from _storages(each)
    elif tensor.layout == torch.strided:
        yield tensor.untyped_storage()
