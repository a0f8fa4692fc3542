"""Rules of PyTorch's own operations: which of their outputs can be recomputed from what they save."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memopt.activations import OPERATIONS, Operation
from memopt.recompute_rules import ELEMENTWISE, NORMALISED, PRODUCT, RULES, Node, Rule, recomputable
from memopt.torch_compat import BATCH_NORMS, SAVED_FIELDS, saved, shows_saved

_LEAF_NODE = "torch::autograd::AccumulateGrad"
_AFFINE_KEY = "memopt.affine"


def signed(value: Any) -> Any:
    """A saved constant as it was given: nodes show negative dimensions as huge positive ones."""
    return value - 2**64 if isinstance(value, int) and value >= 2**63 else value


def _keeps_both_operands(node: Node) -> bool:
    # d(ab) needs a for b's gradient and b for a's: both are saved exactly when both edges lead somewhere. Products
    # with a parameter do not count: sharding may have freed it by the time that a reader of the product asks.
    edges = [edge for edge, _ in node.next_functions]
    return len(edges) == 2 and all(edge is not None and edge.name() != _LEAF_NODE for edge in edges)


@recomputable("MulBackward0", PRODUCT, _keeps_both_operands)
def _product(node: Node) -> Tensor:
    return torch.mul(saved(node, "self"), saved(node, "other"))


@recomputable("ClampBackward1", ELEMENTWISE)
def _clamp(node: Node) -> Tensor:
    return torch.clamp(saved(node, "self"), saved(node, "min"), saved(node, "max"))


@recomputable("PowBackward0", ELEMENTWISE)
def _power(node: Node) -> Tensor:
    return torch.pow(saved(node, "self"), saved(node, "exponent"))


def _copies_its_affine(node: Node) -> bool:
    # The node saves no bias, and sharding may have freed both parameters by the time that a reader of the output asks.
    edges = [edge for edge, _ in node.next_functions[1:3]]
    if any(edge is None or edge.name() != _LEAF_NODE for edge in edges):
        return False
    if _AFFINE_KEY not in node.metadata:
        node.metadata[_AFFINE_KEY] = tuple(edge.variable.detach().clone() for edge in edges)
    return True


def _batch_normalised(node: Node) -> Tensor:
    """By the statistics of the forward: of the batch, or in eval mode the running ones."""
    x, eps = saved(node, "input"), saved(node, BATCH_NORMS[node.name()])
    weight, bias = node.metadata[_AFFINE_KEY]
    if saved(node, "training"):
        # In fp32 at least: eps may be most of the variance, and is subtracted here.
        wide = torch.promote_types(x.dtype, torch.float32)
        mean, rstd = saved(node, "result1").to(wide), saved(node, "result2").to(wide)
        variance, weight, bias = rstd.pow(-2) - eps, weight.to(wide), bias.to(wide)
    else:
        mean, variance = saved(node, "running_mean"), saved(node, "running_var")
    return torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, eps, torch.backends.cudnn.enabled)


for _name in BATCH_NORMS:
    recomputable(_name, NORMALISED, _copies_its_affine)(_batch_normalised)


def _kept_output(node: Node) -> Tensor:
    output: Tensor = saved(node, "output")
    return output


def _kept_result(node: Node) -> Tensor:
    result: Tensor = saved(node, "result")
    return result


def _value_of(operation: Operation) -> Callable[[Node], Tensor]:
    recompute, constants = operation.recompute, operation.constants
    assert recompute is not None

    def output(node: Node) -> Tensor:
        return recompute(saved(node, "self"), *(signed(saved(node, constant)) for constant in constants))

    return output


for _operation in OPERATIONS.values():
    if _operation.recompute is not None:
        recomputable(_operation.node, ELEMENTWISE)(_value_of(_operation))

#: Operations that keep their result: softmax in fp32 and its 16-bit cast, for one, would both be kept.
_KEEP_THEIR_RESULT = (operation.node for operation in OPERATIONS.values() if operation.saves == "output")
for _name in ("SoftmaxBackward0", "ExpBackward0", *_KEEP_THEIR_RESULT):
    RULES[_name] = Rule(_kept_result, lambda node: True, ELEMENTWISE, of_copies_only=True)

#: Attention keeps its output in the layout of the queries; the linear behind it keeps a copy in its own layout.
for _name in ("FlashAttention", "EfficientAttention", "CudnnAttention", "FlashAttentionForCpu"):
    RULES[f"ScaledDotProduct{_name}Backward0"] = Rule(_kept_output, lambda node: True, ELEMENTWISE, of_copies_only=True)

# A rule that cannot read what its nodes saved would fail in backward.
for _name in SAVED_FIELDS:
    if not shows_saved(_name):
        RULES.pop(_name, None)
