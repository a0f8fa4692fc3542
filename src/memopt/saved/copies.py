"""From a tensor that holds the values of another, cast or in another layout, to the node that made those, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from memopt.saved.rules import Node, signed

_CAST, _CLONE = "ToCopyBackward0", "CloneBackward0"
_VIEWS = frozenset({"ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"})

#: What was done to a tensor on its way: ("cast", dtype), ("clone", None), ("view", size), ("transpose", (a, b)) or
#: ("permute", dims).
Step = tuple[str, Any]


@dataclass(frozen=True)
class Source:
    """Where the values of a tensor were made."""

    node: Node
    """The node that made them; None if there is none that a rule could speak of."""
    steps: tuple[Step, ...]
    """What was done to its output since, in order."""

    @property
    def is_copied(self) -> bool:
        return any(what in ("cast", "clone") for what, _ in self.steps)

    @property
    def is_only_cast(self) -> bool:
        return all(what == "cast" for what, _ in self.steps)


def source_of(node: Node) -> Source:
    """Where the output of `node` comes from, below casts, clones and the views between them.

    Autocast and adapters cast; attention's output is copied into another layout for the linear behind it.
    """
    steps: list[Step] = []
    while node is not None:
        name = node.name()
        if name == _CAST:
            steps.append(("cast", node._input_metadata[0].dtype))
        elif name == _CLONE:
            steps.append(("clone", None))
        elif name in _VIEWS:
            steps.append(("view", tuple(node._input_metadata[0].shape)))
        elif name == "TransposeBackward0":
            steps.append(("transpose", (signed(node._saved_dim0), signed(node._saved_dim1))))
        elif name == "PermuteBackward0":
            steps.append(("permute", tuple(map(signed, node._saved_dims))))
        else:
            break
        node, output = node.next_functions[0]
        if output:  # rules speak of first outputs
            return Source(None, ())
    return Source(node, tuple(reversed(steps)))


def done_again(value: Tensor, step: Step) -> Tensor:
    """`value` after one step; where a clone's copy lies in memory is the caller's affair."""
    what, how = step
    if what == "cast":
        return value.to(how)
    if what == "clone":
        return value
    if what == "view":
        return value.reshape(how)
    return value.transpose(*how) if what == "transpose" else value.permute(how)
