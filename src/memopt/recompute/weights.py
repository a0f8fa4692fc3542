"""Weights that are the sum of a weight and an adapter's product: W + alpha * B A, of all experts in one tensor.

The node of such a sum saves B and A, each a few columns or rows of an expert, and not W. W is a leaf, which is there
anyway; whoever knows that it went into the sum says so on the node, and readers then recompute the sum in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from memopt.recompute.rules import RULES, WEIGHT, Node, recomputable
from memopt.recompute.versions import check_version, with_witness
from memopt.torch_compat import FakeTensor, saved, shows_saved

_METADATA_KEY = "memopt.weight"
_SUM = "BaddbmmBackward0"


@dataclass
class Settings:
    """How often a weight was set to itself: PyTorch does that to parametrise it, and counts it as a change in place."""

    count: int = 0
    _version: int = -1

    def see(self, weight: Tensor) -> None:
        """Called once each time that `weight` has been parametrised."""
        self.count += weight._version == self._version + 1
        self._version = weight._version


def tell_weight(value: Tensor, weight: Tensor, settings: Settings) -> bool:
    """Let readers of `value` recompute it from `weight`; False where it is no batched product added to a leaf.

    Args:
        value: (experts, rows, columns), as a forward reads it.
        weight: the leaf of the same shape and dtype that was added, by :func:`adds`.
        settings: which changes of `weight` changed nothing.
    """
    node: Node = value.grad_fn
    if node is None or node.name() != _SUM or _SUM not in RULES or value._version:
        return False
    # A factor is saved where the other one needs a gradient.
    (added, _), *factors = node.next_functions
    is_leaf = not weight.requires_grad if added is None else getattr(added, "variable", None) is weight
    if not is_leaf or any(edge is None for edge, _ in factors) or value.shape != weight.shape:
        return False
    node.metadata[_METADATA_KEY] = (weight, weight._version - settings.count, settings)
    with_witness(value)
    return True


def adds(compute: Callable[[], Tensor], weight: Tensor) -> bool:
    """Whether ``compute()`` adds a batched product to `weight`: what is recomputed is the same to the bit."""
    # Hooks of checkpointing would take what is read here for a backward.
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        value = compute()
        if not tell_weight(value, weight, Settings()):
            return False
        with torch.no_grad(), torch.autocast(value.device.type, enabled=False):
            return isinstance(value, FakeTensor) or torch.equal(_sum(value.grad_fn), value)


@recomputable(_SUM, WEIGHT, lambda node: _METADATA_KEY in node.metadata)
def _sum(node: Node) -> Tensor:
    weight, version, settings = node.metadata[_METADATA_KEY]
    check_version(weight, version + settings.count)
    factors = saved(node, "batch1"), saved(node, "batch2")
    return torch.baddbmm(weight.detach(), *factors, beta=saved(node, "beta"), alpha=saved(node, "alpha"))


if not shows_saved(_SUM):
    RULES.pop(_SUM, None)
