"""Weights that are the sum of a weight and an adapter's product: W + alpha * B A, of all experts in one tensor.

The node of such a sum saves B and A, each a few columns or rows of an expert, but not W. W is a leaf, which stays in
memory anyway. :func:`tell_weight` notes W on the node; readers then recompute the sum in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from memopt.recompute.rules import RULES, WEIGHT, Node, recomputable
from memopt.recompute.versions import check_version, with_witness
from memopt.torch_compat import FakeTensor, saved, shows_saved, without_foreign_hooks

_METADATA_KEY = "memopt.weight"
_SUM = "BaddbmmBackward0"


@dataclass
class Settings:
    """Counts how often a weight was set to itself: PyTorch parametrises it so, and counts that as a change in place."""

    count: int = 0
    _version: int = -1

    def see(self, weight: Tensor) -> None:
        """Called once each time that `weight` has been parametrised."""
        self.count += weight._version == self._version + 1
        self._version = weight._version


def tell_weight(value: Tensor, weight: Tensor, settings: Settings) -> bool:
    """Let readers of `value` recompute it from `weight`; False if `value` is no sum of a batched product and a leaf.

    Args:
        value: (experts, rows, columns), the sum that a forward reads.
        weight: the leaf of equal shape and dtype in this sum; :func:`adds` has checked that.
        settings: counts the changes of `weight` that left its values as they were.
    """
    node: Node = value.grad_fn
    if node is None or node.name() != _SUM or _SUM not in RULES or value._version:
        return False
    # A factor is saved if the other factor needs a gradient: both must.
    (added, _), *factors = node.next_functions
    is_leaf = not weight.requires_grad if added is None else getattr(added, "variable", None) is weight
    if not is_leaf or any(edge is None for edge, _ in factors) or value.shape != weight.shape:
        return False
    node.metadata[_METADATA_KEY] = (weight, weight._version - settings.count, settings)
    with_witness(value)
    return True


def adds(compute: Callable[[], Tensor], weight: Tensor) -> bool:
    """Whether ``compute()`` adds a batched product to `weight`, and the recomputed sum equals its result bit by bit."""
    # Checkpointing's hooks would take the reads of saved tensors here for a backward.
    with without_foreign_hooks():
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
