"""From a tensor that holds the values of another, cast or in another layout, to the node that made those, and back."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from memopt.saved.rules import Node, signed

#: Nodes whose output holds the values of their input: the copies, and the views that stand between copies.
_COPIES = frozenset({"ToCopyBackward0", "CloneBackward0"})
_VIEWS = frozenset({"ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"})

#: What was done to a tensor on its way: ("cast", dtype), ("view", size), ("transpose", (a, b)), ("permute", dims).
Step = tuple[str, Any]


def below_copies(node: Node) -> tuple[Node, tuple[Step, ...], bool]:
    """The node that made what was copied, what was done to it since, in order, and whether there is a copy at all.

    Autocast and adapters cast; attention's output is copied into another layout for the linear behind it.
    """
    steps: list[Step] = []
    copied = False
    while node is not None:
        name = node.name()
        if name in _COPIES:
            copied = True
            if name == "ToCopyBackward0":
                steps.append(("cast", node._input_metadata[0].dtype))
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
            return None, (), copied
    return node, tuple(reversed(steps)), copied


def done_again(value: Tensor, step: Step) -> Tensor:
    what, how = step
    if what == "cast":
        return value.to(how)
    if what == "view":
        return value.reshape(how)
    return value.transpose(*how) if what == "transpose" else value.permute(how)
