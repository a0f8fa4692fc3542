"""Rules of PyTorch's own operations: how to recompute their outputs from the tensors that they save."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memopt.recompute.rules import ELEMENTWISE, NORMALISED, PRODUCT, RULES, Node, Rule, recomputable, saves_output
from memopt.torch_compat import BATCH_NORMS, SAVED_FIELDS, held, saved, shows_saved
from memopt.torch_compat.activations import OPERATIONS, Operation

_LEAF_NODE = "torch::autograd::AccumulateGrad"
_COPIED_KEY = "memopt.copied"


def signed(value: Any) -> Any:
    """A saved constant with its sign: nodes show negative dimensions as huge positive numbers."""
    return value - 2**64 if isinstance(value, int) and value >= 2**63 else value


def _keeps_both_operands(node: Node) -> bool:
    # d(ab) needs a for b's gradient and b for a's: both are saved exactly when both edges have a node. Products with a
    # parameter do not count: sharded training may free it before a reader recomputes the product.
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


def _copies_what_may_change(node: Node) -> bool:
    # The node saves no bias, and sharded training may free both parameters before a reader recomputes the output.
    # A later forward in train mode changes the running statistics without a change of their versions.
    edges = [edge for edge, _ in node.next_functions[1:3]]
    if any(edge is None or edge.name() != _LEAF_NODE for edge in edges):
        return False
    if _COPIED_KEY not in node.metadata:
        read = [edge.variable for edge in edges]
        if not saved(node, "training"):
            # Read only statistics that are at hand: a foreign hook (checkpointing) would run a region again for them.
            statistics = [at_hand(held(node, name)) for name in ("running_mean", "running_var")]
            if any(each is None for each in statistics):
                return False
            read += statistics
        # If the saved tensors are observed, report the copies to the observer as well.
        seen = getattr(held(node, "result1"), "beside", torch.Tensor.detach)
        node.metadata[_COPIED_KEY] = [seen(each.detach().clone()) for each in read]
    return True


def at_hand(packed: Any) -> Tensor | None:
    """The tensor that autograd, a scope or an observer saved as it is (scopes add a version or a holder); else None."""
    if (outer := getattr(packed, "memopt_unpack", None)) is not None:  # a scope passed the tensor on to another hook
        return packed.unpack() if getattr(outer, "memopt_observer", False) else None
    tensor = packed[0] if type(packed) is tuple else packed.tensor if hasattr(packed, "instead") else packed
    return tensor if isinstance(tensor, Tensor) else None


def rounds_anew(node: Node) -> bool:
    """Whether a recomputed output of `node` differs from the output by rounding: of a batch norm in train mode, or of
    a norm that keeps x_hat in fewer bits than those that it scaled."""
    if node.name() in BATCH_NORMS:
        return bool(saved(node, "training"))
    return not saves_output(node) and getattr(node, "rounds_anew", False)


def _batch_normalised(node: Node) -> Tensor:
    """The output, by the statistics that the forward used: of the batch, or in eval mode the running ones."""
    x, eps = saved(node, "input"), saved(node, BATCH_NORMS[node.name()])
    weight, bias, *statistics = (getattr(each, "tensor", each) for each in node.metadata[_COPIED_KEY])
    if statistics:
        mean, variance = statistics
    else:
        # In fp32 at least: eps is subtracted here, and may be most of rstd^-2.
        wide = torch.promote_types(x.dtype, torch.float32)
        mean, rstd = saved(node, "result1").to(wide), saved(node, "result2").to(wide)
        variance, weight, bias = rstd.pow(-2) - eps, weight.to(wide), bias.to(wide)
    return torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, eps, torch.backends.cudnn.enabled)


for _name in BATCH_NORMS:
    recomputable(_name, NORMALISED, _copies_what_may_change)(_batch_normalised)


def _value_of(operation: Operation) -> Callable[[Node], Tensor]:
    recompute, constants = operation.recompute, operation.constants
    assert recompute is not None

    def output(node: Node) -> Tensor:
        return recompute(saved(node, "self"), *(signed(saved(node, constant)) for constant in constants))

    return output


for _operation in OPERATIONS.values():
    if _operation.recompute is not None:
        recomputable(_operation.node, ELEMENTWISE)(_value_of(_operation))

# Operations that save their result. A cast of it need not be saved too, e.g. the 16-bit cast of an fp32 softmax.
# Attention saves its output in the layout of the queries; the linear after it would save a copy in another layout.
for _name, _fields in SAVED_FIELDS.items():
    if _fields in (("result",), ("output",)):
        _output = functools.partial(saved, field=_fields[0])
        RULES[_name] = Rule(_output, lambda node: True, ELEMENTWISE, of_copies_only=True)

# A rule that cannot read what its nodes saved would fail in backward.
for _name in SAVED_FIELDS:
    if not shows_saved(_name):
        RULES.pop(_name, None)
