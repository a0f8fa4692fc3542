"""Record which storages an execution allocates, by which operation, in which module, and which of them are live.

A storage is the block of memory behind a tensor and all its views; memory is counted in storages, never in tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memopt.torch_compat import (
    FakeTensor,
    TracingMode,
    device_read,
    is_operator,
    is_traceable_wrapper_subclass,
    living_storage,
    no_torch_function,
    operator_schema,
    storage_id,
    tree_leaves,
    weak_storage,
)
from memopt.walk.aten.rules import tensors_in

#: Operations whose output holds the values of their input: a cast, or a copy in another layout.
_COPIES = frozenset({"_to_copy", "clone"})
_PLAIN_TYPES = (Tensor, nn.Parameter, FakeTensor)


@dataclass(frozen=True)
class Birth:
    """How a storage was allocated."""

    dtype: str
    shape: tuple[int, ...]
    operation: str
    """The operator that allocated it, e.g. ``mm``; with its namespace if it is not one of PyTorch's own."""
    function: str
    """The function that Python called, e.g. ``layer_norm``; empty if none was seen."""
    module: str
    """The innermost module that was running."""
    copy_of: Birth | None = None
    """The storage whose values it copies or casts."""
    of_parameter: bool = False
    """Whether the copied values are a parameter's or a buffer's."""

    @property
    def origin(self) -> Birth:
        """The storage in which the values were computed, before casts and copies."""
        return self if self.copy_of is None else self.copy_of.origin


@dataclass(eq=False)
class Lifetime:
    """One storage of a step. `born` and `died` are numbers of events; `died` is -1 while it lives."""

    nbytes: int
    birth: Birth
    born: int
    died: int = -1
    before: Lifetime | None = None
    """The lifetime of the first operand, if this storage holds a sum."""
    node: float = -1
    """The number of the node whose backward allocated it; -1 in forward."""
    died_in: float = -1
    recomputed: bool = False
    module: str = ""
    """The module whose forward or backward allocated it."""


def storages(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    """Storages behind `tensors`, looking inside wrapper subclasses (sharded, quantised); none behind meta tensors."""
    for tensor in tensors:
        wrapper: Any = tensor
        if type(wrapper) not in _PLAIN_TYPES and is_traceable_wrapper_subclass(wrapper):
            inner = [getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0]]
            yield from storages(each for each in inner if isinstance(each, Tensor))  # and no device mesh
        # A fake tensor dispatches `is_meta`, several times as slow as the rest; its own attribute is plain.
        elif tensor.layout == torch.strided and not (
            tensor.fake_device.type == "meta" if isinstance(tensor, FakeTensor) else tensor.is_meta
        ):
            yield tensor.untyped_storage()


def distinct_bytes(tree: Any) -> int:
    """Bytes of the storages behind all tensors in `tree`, each storage once."""
    leaves = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
    return sum({storage_id(storage): storage.nbytes() for storage in storages(leaves)}.values())


class StorageTracker(TracingMode):
    """While active, records the birth of every storage with a weak reference to it.

    Args:
        module: returns the name of the module that is running.
        function: returns the name of the Python function that is running.
        parameters: tensors whose copies are marked ``of_parameter``.
    """

    def __init__(
        self,
        module: Callable[[], str] = str,
        function: Callable[[], str] = str,
        parameters: Iterable[Tensor] = (),
    ) -> None:
        super().__init__()
        self._module, self._function = module, function
        self._parameters = {storage_id(storage) for storage in storages(parameters)}
        # The weak reference keeps the address of a freed storage from being used again.
        self._born: dict[int, tuple[Any, Birth]] = {}

    def birth(self, storage: int) -> Birth | None:
        """The birth of the storage with this id, even if it was freed; None if it was allocated before."""
        entry = self._born.get(storage)
        return None if entry is None else entry[1]

    def alive(self) -> Iterator[tuple[torch.UntypedStorage, Birth]]:
        """The recorded storages that something still refers to."""
        for reference, birth in self._born.values():
            storage = living_storage(reference)
            if storage is not None:
                yield storage, birth

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is device_read and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # these reads are half of all that a mode sees
        # In backward, function modes would see every attribute of a tensor that a mode reads here.
        with no_torch_function():
            result = func(*args, **(kwargs or {}))
            self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        inputs: list[torch.UntypedStorage] = []
        aliases: set[int] | None = None
        for output in tensors_in(result):
            for storage in storages([output]):
                address = storage_id(storage)
                if address in self._born or address in self._parameters:
                    continue
                if aliases is None:
                    inputs = list(storages(tensors_in((args, kwargs))))
                    aliases = {storage_id(each) for each in inputs}
                if address in aliases:
                    continue
                name = operator_schema(func).name if is_operator(func) else str(func)
                operation = name.removeprefix("aten::")
                source, of_parameter = None, False
                if operation in _COPIES and inputs:
                    source = self.birth(storage_id(inputs[0]))
                    of_parameter = storage_id(inputs[0]) in self._parameters or (
                        source is not None and source.of_parameter
                    )
                birth = Birth(
                    dtype=str(output.dtype).removeprefix("torch."),
                    shape=tuple(output.shape),
                    operation=operation,
                    function=self._function(),
                    module=self._module(),
                    copy_of=source,
                    of_parameter=of_parameter,
                )
                self._record(storage, birth, args)

    def _record(self, storage: torch.UntypedStorage, birth: Birth, args: Any) -> None:
        self._born[storage_id(storage)] = (weak_storage(storage), birth)
