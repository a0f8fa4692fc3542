"""Whether a tensor that may be gone by now was changed in place while it was there.

Autograd counts the changes of what it keeps. What it does not keep can be changed without a trace, under ``no_grad``
even where a graph goes through it, so whoever makes a tensor that others may copy leaves a witness on its node.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from memopt.recompute_rules import Node
from memopt.torch_compat import FakeTensor

_METADATA_KEY = "memopt.version"


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


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)
