"""The registry of tensors that can be recomputed in backward: one rule per kind of autograd node.

A rule belongs to the node (``tensor.grad_fn``) of a tensor's producer. It tests whether the node saved enough tensors
to recompute its output, and recomputes it from them. The rules of PyTorch's operations are in
`memopt.recompute.operations`; memopt's operators register rules with :func:`register_operator`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

#: Families of outputs: of a norm, of an elementwise function of one tensor, of a product of two tensors, of a linear;
#: and weights computed from other weights.
NORMALISED, ELEMENTWISE, PRODUCT, LINEAR, WEIGHT = "normalised", "elementwise", "product", "linear output", "weight"
#: Probabilities of attention: not saved if queries and keys are saved.
PROBABILITIES = "probabilities"
FAMILIES = frozenset({NORMALISED, ELEMENTWISE, PRODUCT, LINEAR, WEIGHT, PROBABILITIES})
#: A node of the autograd graph (``torch.autograd.graph.Node``; its saved tensors are dynamic attributes).
Node = Any


@dataclass(frozen=True)
class Rule:
    """How the output of one kind of node is recomputed."""

    recompute: Callable[[Node], Tensor]
    """The node's output from the tensors that the node saved."""
    keeps_enough: Callable[[Node], bool]
    """Whether this node saved all that `recompute` reads."""
    family: str
    """The group, one of `FAMILIES`, that patches switch on or off."""
    of_copies_only: bool = False
    """Whether the node saves its output itself, so that only casts and copies of it in other layouts are recomputed."""


RULES: dict[str, Rule] = {}
#: Names of dropout nodes that can be repeated: if a node's `read_unchanged` is true, its output for x is `mask.on(x)`.
MASKED: set[str] = set()


def recomputable(
    node_name: str, family: str, keeps_enough: Callable[[Node], bool] = lambda node: True
) -> Callable[[Callable[[Node], Tensor]], Callable[[Node], Tensor]]:
    """Register the decorated function as the rule of the nodes called `node_name` (``grad_fn.name()``)."""

    def register(recompute: Callable[[Node], Tensor]) -> Callable[[Node], Tensor]:
        RULES[node_name] = Rule(recompute, keeps_enough, family)
        _rule_of_type.clear()
        return recompute

    return register


def register_operator(node_name: str, family: str) -> None:
    """Register the nodes of an operator of memopt, called `node_name`. A node has `recomputes_output` and, if that is
    true, `recomputed` (`memopt.recompute.specs.Recomputed`), which computes the output from all tensors that the node
    saved."""
    recomputable(node_name, family, _recomputes_output)(_output)


def _recomputes_output(node: Node) -> bool:
    # A user's autograd function may have the name of one of memopt's functions.
    return getattr(node, "recomputes_output", False)


def saves_output(node: Node) -> bool:
    """Whether the first saved tensor of `node`, a node of an operator of memopt, is its output."""
    return getattr(node, "saves_output", False)


def _output(node: Node) -> Tensor:
    if saves_output(node):
        return node.saved_tensors[0]  # type: ignore[no-any-return]
    output: Tensor = node.recomputed.function(*node.saved_tensors)
    return output


_rule_of_type: dict[type, Rule | None] = {}


def rule_of(node: Node) -> Rule | None:
    """The rule of `node`, if there is one; cached by the type of the node."""
    kind = type(node)
    try:
        return _rule_of_type[kind]
    except KeyError:
        name = node.name()
        rule = RULES.get(name)
        # Do not cache the type that all operations without a node type of their own share: its name is another.
        if kind.__name__ == name:
            _rule_of_type[kind] = rule
        return rule
