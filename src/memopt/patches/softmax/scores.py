"""What attention scores are computed from: a product of two tensors, followed through elementwise operations and views.

The node of the product has saved both factors, so nothing but what the operations read beside the scores (a mask, a
bias) has to be kept to recompute them. PyTorch's functions are all that is known of the model's code.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from memopt.recompute_rules import Node
from memopt.torch_compat import (
    FakeTensor,
    saved,
    shows_saved,
    storage_id,
)

_PLAIN_TYPES = frozenset({Tensor, nn.Parameter, FakeTensor})
_BMM = "BmmBackward0" if shows_saved("BmmBackward0") else None
_VIEWS = frozenset(
    f"{name}Backward0" for name in ("UnsafeView", "View", "ReshapeAlias", "Permute", "Transpose")
)  # einsum permutes dimensions of size 1
_CAST = Tensor.to

PRODUCTS = frozenset({torch.matmul, torch.bmm, torch.einsum, Tensor.matmul, Tensor.__matmul__, Tensor.bmm})
_ELEMENTWISE = ("add", "sub", "mul", "div", "masked_fill", "where", "clamp", "maximum", "minimum", "tanh")
_LAID_OUT = ("view", "reshape", "unsqueeze", "squeeze", "transpose", "permute", "flatten", "contiguous", "cat")
_OPERATORS = {"__add__": "add", "__radd__": "add", "__sub__": "sub", "__mul__": "mul", "__rmul__": "mul"}
_WRITTEN = {"__iadd__": "add", "__isub__": "sub", "__imul__": "mul", "__itruediv__": "div"}
_IN_PLACE = {f"{name}_": name for name in ("add", "sub", "mul", "div", "masked_fill", "clamp")}
_CASTS = ("to", "float", "half", "bfloat16", "double", "type", "type_as")


def _steps(meant: Mapping[str, str]) -> dict[Any, Callable[..., Tensor]]:
    # `torch.where` and `Tensor.where` have their arguments in different orders.
    owners = [(owner, name) for owner in (Tensor, torch) for name in meant if hasattr(owner, name)]
    return {getattr(owner, name): getattr(owner, meant[name]) for owner, name in owners}


#: Operations that are followed -> what computes the same into a new tensor.
STEPS: dict[Any, Callable[..., Tensor]] = {
    **_steps({name: name for name in (*_ELEMENTWISE, *_LAID_OUT)}),
    **_steps({"__truediv__": "div", **_OPERATORS, **_WRITTEN, **_IN_PLACE}),
    **{getattr(Tensor, name): _CAST for name in _CASTS},
}


class _Slot:
    """Stands for an argument that is there when the step is recomputed: the scores, or what was read beside them."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


_SCORES = _Slot(-1)
_Step = tuple[Callable[..., Tensor], Sequence[Any], Mapping[str, Any]]


class _Read(NamedTuple):
    """What a step has read beside the scores."""

    tensor: Tensor
    """Without a graph."""
    version: int
    made_here: bool
    """In the forward that is followed, for all that is known; what was made before is shared with other layers."""


class Scores(NamedTuple):
    """How a tensor is recomputed."""

    product: Node
    shape: torch.Size
    """Of the product."""
    steps: tuple[_Step, ...] = ()
    reads: tuple[_Read, ...] = ()

    @property
    def read(self) -> list[Tensor]:
        """What the steps read beside the scores."""
        return [each.tensor for each in self.reads]

    @property
    def compute(self) -> Callable[[Sequence[Tensor]], Tensor]:
        """compute(read) -> the tensor, while backward has not been through the product. It holds no tensor."""
        return functools.partial(_compute, self.product, self.shape, self.steps)

    def costs_less_than(self, nbytes: int) -> bool:
        """Whether keeping what is read beside the scores is worth leaving out so many bytes, and nothing has changed.

        What other layers read as well is kept once for all; if none does, no more is kept than before.
        """
        unchanged = all(each.tensor._version == each.version for each in self.reads)
        return unchanged and _bytes(each.tensor for each in self.reads) <= nbytes


def _compute(product: Node, shape: torch.Size, steps: Sequence[_Step], read: Sequence[Tensor]) -> Tensor:
    value = torch.bmm(saved(product, "self"), saved(product, "mat2")).view(shape)

    def filled(each: Any) -> Any:
        if type(each) is not _Slot:
            return each
        return value if each is _SCORES else read[each.index]

    for function, args, kwargs in steps:
        named = dict(zip(kwargs, _mapped(filled, kwargs.values()), strict=True))
        value = function(*_mapped(filled, args), **named)
    return value


class Followed:
    """The tensors of one forward of which it is known how they are recomputed."""

    def __init__(self, given: Iterable[Any]) -> None:
        """`given` are the arguments of the forward."""
        self._given = {storage_id(each.untyped_storage()) for each in given if type(each) in _PLAIN_TYPES}
        self._known: dict[int, tuple[weakref.ref[Tensor], int, Scores]] = {}

    @property
    def is_empty(self) -> bool:
        return not self._known

    def scores_of(self, x: Any) -> Scores | None:
        """How `x` is recomputed; None where that is not known, or where it was changed in place since."""
        known = self._known.get(id(x))
        if known is None:
            return None
        reference, version, scores = known
        return scores if reference() is x and version == x._version else None  # type: ignore[union-attr]

    def among(self, args: Sequence[Any]) -> tuple[Scores, Tensor] | None:
        """The first of these arguments that can be recomputed."""
        for each in args:
            if type(each) in (list, tuple):
                found = self.among(each)
                if found is not None:
                    return found
            elif (scores := self.scores_of(each)) is not None:
                return scores, each
        return None

    def product(self, output: Any) -> None:
        """`output` is what one of `PRODUCTS` returned."""
        # Then views of the product's own result have left its elements in their order.
        if type(output) not in _PLAIN_TYPES or not output.is_contiguous() or output.storage_offset():
            return
        node: Node = output.grad_fn
        while node is not None and node.name() in _VIEWS:
            node = node.next_functions[0][0]
        # It has saved both factors where both have a gradient.
        if node is not None and node.name() == _BMM and all(edge is not None for edge, _ in node.next_functions):
            self._note(output, Scores(node, output.shape))

    def step(
        self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], scores: Scores, x: Tensor, output: Any
    ) -> None:
        """`output` is what one of `STEPS` made of `x`, which is computed as `scores` says, and of other arguments."""
        if type(output) is not type(x) or output.device != x.device:
            return
        reads = list(scores.reads)
        cast: _Step = (_CAST, (_SCORES, output.dtype), {})
        steps = [*scores.steps, cast]
        if STEPS[function] is not _CAST:
            slots = {id(x): _SCORES}

            def slot(each: Any) -> Any:
                if isinstance(each, Tensor) and id(each) not in slots:
                    slots[id(each)] = _Slot(len(reads))
                    reads.append(self._read(each))
                return slots.get(id(each), each)

            named = dict(zip(kwargs, _mapped(slot, kwargs.values()), strict=True))
            steps[-1:] = [(STEPS[function], _mapped(slot, args), named)]
            if output is x:  # written in place, in the dtype that it had
                steps.append(cast)
        elif output is x:
            return
        # What is made here and as large would live longer, to be kept in the scores' place.
        here = 2 * _bytes(each.tensor for each in reads if each.made_here)
        if here <= output.nbytes and all(type(each.tensor) in _PLAIN_TYPES for each in reads):
            self._note(output, Scores(scores.product, scores.shape, tuple(steps), tuple(reads)))

    def _read(self, other: Tensor) -> _Read:
        base = other if other._base is None else other._base
        # Sharding may have freed a parameter by the time of backward.
        is_parameter = base.grad_fn is None and base.requires_grad
        tensor = other.detach().clone() if is_parameter else other.detach()
        return _Read(tensor, tensor._version, storage_id(tensor.untyped_storage()) not in self._given)

    def _note(self, output: Tensor, scores: Scores) -> None:
        if output.requires_grad:
            key = id(output)
            # What a step has read lives no longer than what it made.
            reference = weakref.ref(output, lambda _: self._known.pop(key, None))
            self._known[key] = reference, output._version, scores


def _bytes(tensors: Iterable[Tensor]) -> int:
    storages = [each.untyped_storage() for each in tensors]
    return sum({storage_id(storage): storage.nbytes() for storage in storages}.values())


def _mapped(function: Callable[[Any], Any], arguments: Iterable[Any]) -> list[Any]:
    """`function` of each of `arguments`, and of each part of those that are lists."""
    return [list(map(function, each)) if type(each) in (list, tuple) else function(each) for each in arguments]
