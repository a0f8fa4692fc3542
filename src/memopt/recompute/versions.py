"""Whether a tensor was changed in place, by autograd's version counter.

Autograd counts the changes of what it keeps. What it does not keep can be changed without a trace, under ``no_grad``
even where a graph goes through it, so whoever makes a tensor that others may copy leaves a witness on its node.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from memopt.recompute.rules import Node
from memopt.torch_compat import FakeTensor

_METADATA_KEY = "memopt.version"


def versions_of(tensors: Sequence[Tensor | None]) -> list[int]:
    """How often each was changed in place; None is left out."""
    try:
        return [tensor._version for tensor in tensors if tensor is not None]
    except RuntimeError:  # tensors of inference have no version
        there = (tensor for tensor in tensors if tensor is not None)
        return [0 if tensor.is_inference() else tensor._version for tensor in there]


def check_version(tensor: Tensor, version: int) -> None:
    """Raise as autograd would where `tensor` was changed in place since it was at `version`.

    Raises:
        RuntimeError: it was.
    """
    if tensor._version != version:
        raise changed_in_place(f"[{tensor.type()} {list(tensor.shape)}]", tensor._version, version)


def changed_in_place(what: str, version: object, expected: object, why: str = "") -> RuntimeError:
    """The error for a change of `what`, which begins as autograd's does."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{what} is at version {version}; expected version {expected} instead{why}."
    )


def with_witness(output: Tensor) -> Tensor:
    """`output`, whose node shares its version counter from here on, and nothing of its memory."""
    node: Node = output.grad_fn
    if node is not None and type(output) in (Tensor, FakeTensor) and output._version == 0:
        witness = output.detach()
        witness.data = _nothing(output.dtype, output.device) if type(output) is Tensor else output.new_empty(0)
        node.metadata[_METADATA_KEY] = witness
    return output


def is_unchanged(node: Node) -> bool:
    """Whether the output of `node` has a witness, which saw no change."""
    witness = node.metadata.get(_METADATA_KEY)
    return witness is not None and witness._version == 0


def was_changed(node: Node) -> bool:
    """Whether the output of `node` has a witness that saw a change."""
    witness = node.metadata.get(_METADATA_KEY)
    return witness is not None and witness._version != 0


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)
