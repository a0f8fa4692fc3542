"""Whether a tensor was changed in place, by autograd's version counter.

Autograd checks only the versions of saved tensors. A change of another tensor leaves no trace, under ``no_grad`` not
even in a graph. So the producer of a tensor that others may copy leaves a witness on its node (:func:`with_witness`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from memopt.recompute.rules import Node
from memopt.torch_compat import FakeTensor

_METADATA_KEY = "memopt.version"
T = TypeVar("T")


class Noted(Generic[T]):
    """Notes on tensors with a gradient, by object, as long as they are alive and unchanged."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int, T]] = {}

    def note(self, tensor: Tensor, known: T) -> None:
        if tensor.requires_grad:
            key = id(tensor)
            # The note may hold other tensors: for no longer than `tensor` lives.
            reference = weakref.ref(tensor, lambda _: self._known.pop(key, None))
            self._known[key] = reference, tensor._version, known

    def of(self, tensor: Any) -> T | None:
        """The note on `tensor`; None without one, or if the tensor was changed in place since."""
        known = self._known.get(id(tensor))
        if known is None or known[0]() is not tensor:
            return None
        return known[2] if known[1] == tensor._version else None  # type: ignore[union-attr]


def versions_of(tensors: Sequence[Tensor | None]) -> list[int]:
    """Versions: how often each tensor was changed in place; None is left out."""
    try:
        return [tensor._version for tensor in tensors if tensor is not None]
    except RuntimeError:  # inference tensors have no version
        there = (tensor for tensor in tensors if tensor is not None)
        return [0 if tensor.is_inference() else tensor._version for tensor in there]


def check_version(tensor: Tensor, version: int, why: str = "") -> None:
    """Raise the error of autograd (RuntimeError) if `tensor` was changed in place since it was at `version`."""
    if tensor._version != version:
        raise changed_in_place(f"[{tensor.type()} {list(tensor.shape)}]", tensor._version, version, why)


def changed_in_place(what: str, version: int, expected: int, why: str = "") -> RuntimeError:
    """The error for a change of `what`, at its expected version if a write left no trace there; its text begins as
    autograd's error does."""
    change = f"is at version {version}; expected version {expected} instead"
    if version == expected:
        change = f"has other values at the same version {version}, as after a write through .data"
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{what} {change}{why}."
    )


def with_witness(output: Tensor) -> Tensor:
    """`output`; its node gets a witness, an empty tensor that shares the version counter and no memory of `output`."""
    node: Node = output.grad_fn
    if node is not None and type(output) in (Tensor, FakeTensor) and output._version == 0:
        witness = output.detach()
        witness.data = _nothing(output.dtype, output.device) if type(output) is Tensor else output.new_empty(0)
        node.metadata[_METADATA_KEY] = witness
    return output


def is_unchanged(node: Node) -> bool:
    """Whether the output of `node` has a witness and was not changed in place."""
    witness = node.metadata.get(_METADATA_KEY)
    return witness is not None and witness._version == 0


def was_changed(node: Node) -> bool:
    """Whether the output of `node` has a witness and was changed in place."""
    witness = node.metadata.get(_METADATA_KEY)
    return witness is not None and witness._version != 0


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)
