"""Steps of operations that leave nodes in the autograd graph: tables from a kind of node to its step.

`memopt.recompute.graph` follows nodes by these tables, from a tensor back to a node with a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt.recompute.expression import Branch, Step, cast_to, step
from memopt.recompute.operations import signed
from memopt.recompute.rules import Node
from memopt.torch_compat import PADS, input_metadata, saved, shows_saved

FILL_KEY = "memopt.fill"


class Mask(Protocol):
    """The mask of a dropout, described by numbers. Hashable; equal objects describe equal masks."""

    def on(self, x: Tensor) -> Tensor:
        """`x` dropped out."""


@dataclass(eq=False)
class Padding:
    """Padding with a constant. The node does not save the constant, so it is read from the padded tensor."""

    pads: tuple[int, ...]
    fill: Tensor | complex | None = None
    """The constant: a number on the CPU, elsewhere a 0-dimensional tensor; None before :meth:`read`, or without a
    border."""

    def read(self, padded: Tensor) -> None:
        """Read the constant from the padded tensor, without a device synchronisation."""
        for dim, (before, after) in _sides(self.pads):
            if self.fill is None and (before > 0 or after > 0):
                border = padded.detach().select(dim, 0 if before > 0 else -1)
                if border.numel():
                    fill = border[(0,) * border.dim()]
                    self.fill = fill.item() if type(fill) is Tensor and fill.device.type == "cpu" else fill.clone()

    def around(self, value: Tensor) -> Tensor:
        size = list(value.shape)
        for dim, (before, after) in _sides(self.pads):
            size[dim] += before + after
        whole = value.new_empty(size)
        if self.fill is not None:
            whole.fill_(self.fill)
        inside = whole
        for dim, (before, after) in _sides(self.pads):
            length = value.size(dim) + min(before, 0) + min(after, 0)
            inside = inside.narrow(dim, max(before, 0), length)
            value = value.narrow(dim, max(-before, 0), length)
        inside.copy_(value)
        return whole


def clone(value: Tensor) -> Tensor:
    """Stands for a copy. It returns `value` itself: the reader decides on the copy's strides and memory."""
    return value


def padded(value: Tensor, padding: Padding) -> Tensor:
    """`value` with a constant around it."""
    return padding.around(value)


def dropped_out(value: Tensor, mask: Mask) -> Tensor:
    """`value` after a dropout."""
    return mask.on(value)


def rows(value: Tensor, node: Node) -> Tensor:
    """The rows of `value` whose indices `node` saved."""
    chosen: Tensor = torch.ops.aten.index(value, saved(node, "indices"))
    return chosen


def scaled(value: Tensor, node: Node, field: str) -> Tensor:
    """`value` times (or divided by) the tensor that `node` saved as `field`, with the operation's order of operands."""
    if node.name() == DIVISION:
        return torch.div(value, saved(node, field))
    return torch.mul(value, saved(node, field)) if field == "other" else torch.mul(saved(node, field), value)


def part(value: Tensor, dim: int, start: int, end: int, stride: int) -> Tensor:
    """A slice along one dimension."""
    sliced: Tensor = torch.ops.aten.slice(value, dim, start, end, stride)
    return sliced


def one_of(value: Tensor, into: Callable[..., Sequence[Tensor]], sizes: Any, dim: int, place: int) -> Tensor:
    """One of the tensors that `into` splits `value` into."""
    return into(value, *sizes, dim)[place]


def _constants(node: Node, *fields: str) -> list[Any]:
    return [
        tuple(map(signed, value)) if isinstance(value, tuple) else signed(value)
        for value in (saved(node, field) for field in fields)
    ]


def _calls(function: Callable[..., Tensor], *fields: str) -> Callable[[Node], Step]:
    """For nodes that save all arguments beside the tensor in `fields`: makes the step that calls `function`."""
    return lambda node: step(function, *_constants(node, *fields))


def _shape(node: Node) -> tuple[int, ...]:
    assert input_metadata is not None
    return tuple(input_metadata(node)[0].shape)


def _cast(node: Node) -> Step:
    assert input_metadata is not None
    return cast_to(input_metadata(node)[0].dtype)


def _padded_by(mode: str) -> Callable[[Node], Step]:
    return lambda node: step(F.pad, *_constants(node, "padding"), mode)


def _shown(table: dict[str, Any]) -> dict[str, Any]:
    return {name: made for name, made in table.items() if shows_saved(name)}


CAST, CLONE, CAT, CONSTANT_PAD, DIVISION, REPEAT = (
    f"{name}Backward0" for name in ("ToCopy", "Clone", "Cat", "ConstantPadNd", "Div", "Repeat")
)
#: Nodes of views (or copies) that keep the order of elements; the step reads the new shape from the node.
VIEWS = frozenset({"ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"})
_SQUEEZES = tuple(f"SqueezeBackward{i}" for i in range(3))
_OF_SHAPE: dict[str, Callable[[Node], Step]] = {
    CAST: _cast,
    **dict.fromkeys((*VIEWS, *_SQUEEZES), lambda node: step(Tensor.reshape, _shape(node))),
    "ExpandBackward0": lambda node: step(Tensor.expand, _shape(node)),
}
#: Kind of node of one tensor -> the step from that tensor to the node's output.
STEP_OF: dict[str, Callable[[Node], Step]] = {
    CLONE: _calls(clone),
    "NegBackward0": _calls(torch.neg),
    "ViewAsComplexBackward0": _calls(torch.view_as_complex),
    "ViewAsRealBackward0": _calls(torch.view_as_real),
    **({} if input_metadata is None else _OF_SHAPE),
    **_shown(
        {
            "TransposeBackward0": _calls(Tensor.transpose, "dim0", "dim1"),
            "PermuteBackward0": _calls(Tensor.permute, "dims"),
            "SelectBackward0": _calls(Tensor.select, "dim", "index"),
            "SliceBackward0": _calls(part, "dim", "start", "end", "step"),
            "UnsqueezeBackward0": _calls(Tensor.unsqueeze, "dim"),
            "RollBackward0": _calls(torch.roll, "shifts", "dims"),
            "FlipBackward0": _calls(torch.flip, "dims"),
            REPEAT: _calls(Tensor.repeat, "repeats"),
            "IndexBackward0": lambda node: step(rows, node),
            **{name: _padded_by(mode) for name, mode in PADS.items()},
        }
    ),
}
#: Kind of node of several outputs -> (node, which output) -> the step from the split tensor to that output.
SPLITS: dict[str, Callable[[Node, int], Step]] = _shown(
    {
        "SplitBackward0": lambda node, i: _split(node, i, torch.split, "split_size"),
        "SplitWithSizesBackward0": lambda node, i: _split(node, i, torch.split, "split_sizes"),
        "UnbindBackward0": lambda node, i: _split(node, i, torch.unbind),
    }
)
#: Kind of node of several tensors -> (node, a branch for each tensor) -> the step to the node's output.
JOINS: dict[str, Callable[[Node, tuple[Branch, ...]], Step]] = _shown(
    {
        "AddBackward0": lambda node, terms: (torch.add, terms, (("alpha", saved(node, "alpha")),)),
        "SubBackward0": lambda node, terms: (torch.sub, terms, (("alpha", saved(node, "alpha")),)),
        CAT: lambda node, parts: (torch.cat, (parts, *_constants(node, "dim")), ()),
        "StackBackward0": lambda node, parts: (torch.stack, (parts, *_constants(node, "dim")), ()),
    }
)
SUMS = frozenset({"AddBackward0", "SubBackward0"})
#: Nodes of two tensors; one that needs no gradient is saved, and the other one is followed.
SCALES = frozenset(_shown({"MulBackward0": None, DIVISION: None}))


def _split(node: Node, place: int, into: Any, *fields: str) -> Step:
    return step(one_of, into, tuple(_constants(node, *fields)), *_constants(node, "dim"), place)


def scale_of(node: Node) -> tuple[int, Step] | None:
    """Which operand of a product or quotient is followed, and the step; None if both operands need a gradient."""
    (first, _), (second, _) = node.next_functions
    if second is None:
        return 0, step(scaled, node, "other")
    if first is None and node.name() != DIVISION:
        return 1, step(scaled, node, "self")
    return None


#: Steps that copy in the same dtype, and steps that read some of the rows (each expert reads its own rows).
COPIES: frozenset[Any] = frozenset({clone, padded, rows, F.pad})
PARTS: frozenset[Any] = frozenset({rows, Tensor.select})
CLONED = step(clone)
#: Steps whose result need not be compared: a cast is made at once, and a witness detects a change before a copy.
PLAIN: frozenset[Any] = COPIES | PARTS | {Tensor.to, Tensor.reshape, Tensor.transpose, Tensor.permute, dropped_out}


def all_steps(steps: Sequence[Step]) -> Iterator[Step]:
    """All steps, with the steps of branches before the step that has them."""
    for each in steps:
        for argument in each[1]:
            for branch in argument if type(argument) is tuple else (argument,):
                if type(branch) is Branch:
                    yield from all_steps(branch.steps)
        yield each


def _sides(pads: Sequence[int]) -> list[tuple[int, tuple[int, int]]]:
    """(negative dimension, (elements added before it, elements added after it)) for each padded dimension."""
    return [(-1 - i, (pads[2 * i], pads[2 * i + 1])) for i in range(len(pads) // 2)]
