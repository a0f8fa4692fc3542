"""Finds the parameter that a tensor is a view or copy of, and the parameter's axis that each dimension runs along.

A view of a parameter is recognised by its storage and strides, so transposes, chunks and slices need no rule. A
copy (cast, gather, reshape of a permuted weight) is followed op by op. `memopt.walk.flow.shadow` records the uses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memopt.torch_compat import storage_id
from memopt.walk.aten.rules import OpCall


@dataclass(frozen=True)
class Along:
    """A dimension that walks one axis of the parameter: coordinates start, start + step, ..."""

    axis: int
    start: int
    step: int
    size: int

    def coordinates(self) -> Tensor:
        return torch.arange(self.size) * self.step + self.start


#: A dimension of size one, which walks no axis; None is a dimension that is not understood.
SINGLE = "single"
Dimension = Along | str | None


@dataclass(frozen=True)
class ParameterView:
    """A tensor whose elements are elements of one parameter, and the axis that each of its dimensions walks."""

    parameter: nn.Parameter
    dims: tuple[Dimension, ...]


def storage_key(tensor: Tensor) -> int | None:
    """Identity of the storage, on meta too; None for wrapper tensors, which have none. Valid while the tensor lives."""
    try:
        return storage_id(tensor.untyped_storage())
    except RuntimeError:
        return None


class ParameterTable:
    """The parameters of a model, by storage and by name."""

    def __init__(self, model: nn.Module) -> None:
        self.names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.names.setdefault(id(parameter), []).append(name)
        self.by_name = dict(model.named_parameters(remove_duplicate=False))
        self._by_storage: dict[int, nn.Parameter] = {}
        self.overlapping: set[int] = set()
        self.read: set[int] = set()
        """Ids of the parameters that operations have read."""
        for parameter in model.parameters():
            key = storage_key(parameter)
            if key is None:
                continue
            other = self._by_storage.setdefault(key, parameter)
            if other is not parameter:
                self.overlapping |= {id(other), id(parameter)}
        self._copies: dict[int, tuple[Tensor, ParameterView]] = {}
        self._buffers = {id(buffer) for buffer in model.buffers()}
        self._computed: dict[int, tuple[Tensor, nn.Parameter | None]] = {}
        """Tensors computed from parameters, buffers and constants alone, each with the largest of the parameters."""

    def name(self, parameter: nn.Parameter, module: str = "") -> str:
        """Name of `parameter`; of a tied one, the name inside `module`."""
        names = self.names[id(parameter)]
        return next((n for n in names if n.rpartition(".")[0] == module), names[0])

    def view(self, tensor: Any) -> ParameterView | None:
        """`tensor` as a view or a followed copy of a parameter; None if it is neither."""
        if not isinstance(tensor, Tensor):
            return None
        copied = self._copies.get(id(tensor))
        if copied is not None:
            return copied[1]
        key = storage_key(tensor)
        parameter = self._by_storage.get(key) if key is not None else None
        if parameter is None:
            return None
        self.read.add(id(parameter))
        return ParameterView(parameter, _dimensions(tensor, parameter))

    def forget_copies(self) -> None:
        self._copies.clear()
        self._computed.clear()

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether `tensor` is a parameter, or was computed in this forward from parameters and constants alone."""
        return id(tensor) in self._computed or self.view(tensor) is not None

    def computed_from(self, tensor: Tensor) -> nn.Parameter | None:
        """The largest parameter from which this forward computed `tensor`, if no activation had a part in it."""
        return self._computed[id(tensor)][1] if id(tensor) in self._computed else None

    def compute(self, call: OpCall) -> None:
        """Follow an op whose tensors are parameters, buffers, constants, and what was computed from them."""
        found: list[nn.Parameter] = []
        for tensor in call.tensors:
            view = self.view(tensor)
            parameter = self.computed_from(tensor) if view is None else view.parameter
            if parameter is not None:
                found.append(parameter)
            elif tensor.numel() > 1 and id(tensor) not in self._computed and id(tensor) not in self._buffers:
                for out in call.outputs:  # written in place
                    self._computed.pop(id(out), None)
                return
        largest = max(found, key=lambda each: each.numel(), default=None)
        self._computed |= {id(out): (out, largest) for out in call.outputs if self.view(out) is None}

    def follow(self, name: str, args: tuple[Any, ...], source: Tensor, outputs: list[Tensor]) -> bool:
        """Follow an op that views or copies `source`, which has a `view`, into its outputs; False for any other op."""
        view = self.view(source)
        assert view is not None
        same_memory = all(storage_key(out) == storage_key(source) for out in outputs)
        if same_memory:
            if id(source) in self._copies:
                dims = _through_view(name, args, source, outputs, view.dims)
                for out in outputs:
                    self._copies[id(out)] = (out, ParameterView(view.parameter, dims or (None,) * out.dim()))
            return True
        if len(outputs) != 1:
            return False
        followed = _through_copy(name, args, source, outputs[0], view.dims)
        if followed is None:
            return False
        self._copies[id(outputs[0])] = (outputs[0], ParameterView(view.parameter, followed))
        return True


def _dimensions(tensor: Tensor, parameter: nn.Parameter) -> tuple[Dimension, ...]:
    if not parameter.is_contiguous():
        return (None,) * tensor.dim()
    shape, strides = parameter.shape, parameter.stride()
    origin = int(tensor.storage_offset() - parameter.storage_offset())

    def locate(offset: int) -> list[int]:
        return [
            0 if size <= 1 or stride == 0 else (offset // stride) % size
            for stride, size in zip(strides, shape, strict=True)
        ]

    dims: list[Dimension] = []
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size == 1:
            dims.append(SINGLE)
            continue
        first, second, last = (locate(origin + int(stride) * k) for k in (0, 1, int(size) - 1))
        moved = [axis for axis in range(len(shape)) if first[axis] != second[axis] or first[axis] != last[axis]]
        if stride == 0 or len(moved) != 1:
            dims.append(None)  # broadcast, or two axes of the parameter merged in one dimension
        else:
            dims.append(Along(moved[0], first[moved[0]], second[moved[0]] - first[moved[0]], size))
    return tuple(dims)


def _through_copy(
    name: str, args: tuple[Any, ...], source: Tensor, out: Tensor, dims: tuple[Dimension, ...]
) -> tuple[Dimension, ...] | None:
    """Dimensions of a copy of `source`; None when the op does anything but copy, gather or scale it."""
    if name in {"_to_copy", "clone", "contiguous", "detach", "alias"} and args[0] is source:
        return dims
    if name == "index" and args[0] is source:
        index = args[1]
        if len(index) == 1 and index[0] is not None and index[0].dtype != torch.bool:
            gathered: int = index[0].dim()
            return (*(None,) * gathered, *dims[1:])
    if name == "index_select" and args[0] is source:
        return tuple(None if d == args[1] % source.dim() else dim for d, dim in enumerate(dims))
    if name in {"mul", "div"} and args[0] is source and out.shape == source.shape:
        factor = args[1]
        if not isinstance(factor, Tensor) or factor.numel() == 1:
            return dims
    return None


def _through_view(
    name: str, args: tuple[Any, ...], source: Tensor, outputs: list[Tensor], dims: tuple[Dimension, ...]
) -> tuple[Dimension, ...] | None:
    """Dimensions of a view of a followed copy, whose strides do not show the parameter's axes."""
    if len(outputs) != 1:
        return None
    out, rank = outputs[0], source.dim()
    if out.shape == source.shape and name not in {"t", "transpose", "permute"}:
        return dims
    if name == "t":
        return dims[::-1]
    if name == "transpose":
        swapped = list(dims)
        i, j = args[1] % rank, args[2] % rank
        swapped[i], swapped[j] = swapped[j], swapped[i]
        return tuple(swapped)
    if name == "permute":
        order: list[int] = args[1]
        return tuple(dims[d % rank] for d in order)
    if name == "unsqueeze":
        at = args[1] % (rank + 1)
        return (*dims[:at], SINGLE, *dims[at:])
    if name == "select":
        at = args[1] % rank
        return (*dims[:at], *dims[at + 1 :])
    if name == "expand":
        added = out.dim() - rank
        grown = (dim if out.size(i + added) == source.size(i) else None for i, dim in enumerate(dims))
        return (*(None,) * added, *grown)
    if name in {"view", "_unsafe_view"} and rank and out.dim() and out.shape[-1] == source.shape[-1]:
        return (*(None,) * (out.dim() - 1), dims[-1])
    return None
