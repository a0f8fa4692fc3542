"""Records expressions from the autograd graph: what was done to a tensor since a node with a rule made it.

Followed are casts, copies in another layout or with a border, parts that were read, and dropouts that can be repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt.recompute.expression import Expression, Step, cast_to, step
from memopt.recompute.operations import signed
from memopt.recompute.rules import MASKED, Node, Rule, rule_of
from memopt.recompute.versions import is_unchanged
from memopt.torch_compat import input_metadata, saved, shows_saved

_CAST, _CLONE, _CAT = "ToCopyBackward0", "CloneBackward0", "CatBackward0"
_TRANSPOSE, _PERMUTE, _CONSTANT_PAD, _INDEX, _SELECT = (
    f"{name}Backward0" if shows_saved(f"{name}Backward0") else None
    for name in ("Transpose", "Permute", "ConstantPadNd", "Index", "Select")
)
_VIEWS = frozenset({"ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"})
_MODES = {
    f"{name}Pad{rank}DBackward0": mode
    for name, mode in (("Reflection", "reflect"), ("Replication", "replicate"))
    for rank in (1, 2, 3)
    if shows_saved(f"{name}Pad{rank}DBackward0")
}
_FILL_KEY = "memopt.fill"
#: Functions of ZeRO-3 that return their input (deepspeed/runtime/zero/parameter_offload.py), a class for each module.
_SAME = frozenset({"PreBackwardFunctionForModuleBackward", "PostBackwardFunctionModuleBackward"})
#: Nodes that `expression_of` looks through, beside those of dropouts.
_STEPS = frozenset({_CAST, _CLONE, _CAT, _TRANSPOSE, _PERMUTE, _CONSTANT_PAD, _INDEX, _SELECT, *_VIEWS, *_MODES})


class Mask(Protocol):
    """What a dropout did to a tensor, in numbers: hashable, equal where it is the same."""

    def on(self, x: Tensor) -> Tensor:
        """`x` dropped out."""


@dataclass(eq=False)
class Padding:
    """A constant around a tensor. Its node does not say which: an element of what it made does."""

    pads: tuple[int, ...]
    fill: Tensor | None = None
    """An element of the border, of no dimension; None until one is asked for, and where there is no border."""

    def read(self, padded: Tensor) -> None:
        """Find the constant in the tensor that was padded (the device is not waited for)."""
        for dim, (before, after) in _sides(self.pads):
            if self.fill is None and (before > 0 or after > 0):
                border = padded.detach().select(dim, 0 if before > 0 else -1)
                if border.numel():
                    self.fill = border[(0,) * border.dim()].clone()

    def around(self, value: Tensor) -> Tensor:
        size = list(value.shape)
        for dim, (before, after) in _sides(self.pads):
            size[dim] += before + after
        whole = value.new_empty(size)
        if self.fill is not None:
            whole.copy_(self.fill)
        inside = whole
        for dim, (before, after) in _sides(self.pads):
            length = value.size(dim) + min(before, 0) + min(after, 0)
            inside = inside.narrow(dim, max(before, 0), length)
            value = value.narrow(dim, max(-before, 0), length)
        inside.copy_(value)
        return whole


def clone(value: Tensor) -> Tensor:
    """A copy, of which the reader says where it lies in memory."""
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


#: Steps that copy in the same dtype, and steps that read some of the rows: experts each read theirs.
_COPIES: frozenset[Any] = frozenset({clone, padded, rows, F.pad})
_PARTS: frozenset[Any] = frozenset({rows, Tensor.select})
_CLONED = step(clone)


def _sides(pads: Sequence[int]) -> list[tuple[int, tuple[int, int]]]:
    """(dimension, counted from behind; what was added before and after it)"""
    return [(-1 - i, (pads[2 * i], pads[2 * i + 1])) for i in range(len(pads) // 2)]


_is_step_type: dict[type, bool] = {}


def may_have_rule(node: Node) -> bool:
    """Whether `expression_of` may find a node with a rule: the same way, without noting what was done on it."""
    while node is not None:
        kind = type(node)
        is_step = _is_step_type.get(kind)
        if is_step is None:
            name = node.name()
            is_step = name in _STEPS or name in MASKED or name in _SAME
            if kind.__name__ == name and name not in _SAME:  # whose type would keep the module
                _is_step_type[kind] = is_step
        if not is_step:
            return rule_of(node) is not None
        edges = node.next_functions
        node = edges[0][0] or edges[-1][0]
    return False


def expression_of(node: Node) -> Expression:
    """How the output of `node` is computed, below casts, dropouts, clones, pads and the views between them.

    Autocast and adapters cast; attention's output is copied into another layout for the linear behind it; convolutions
    with borders of their own read a padded copy; adapters read a dropped-out one. The rule is None where there is none.
    """
    steps: list[Step] = []
    while node is not None:
        name = node.name()
        if name == _CAST and input_metadata is not None:
            steps.append(cast_to(input_metadata(node)[0].dtype))
        elif name == _CLONE or (name == _CAT and _is_of_one(node)):
            steps.append(_CLONED)
        elif name in _VIEWS and input_metadata is not None:
            steps.append(step(Tensor.reshape, tuple(input_metadata(node)[0].shape)))
        elif name == _TRANSPOSE:
            steps.append(step(Tensor.transpose, signed(saved(node, "dim0")), signed(saved(node, "dim1"))))
        elif name == _PERMUTE:
            steps.append(step(Tensor.permute, tuple(map(signed, saved(node, "dims")))))
        elif name == _SELECT:
            steps.append(step(Tensor.select, signed(saved(node, "dim")), signed(saved(node, "index"))))
        elif name == _INDEX:
            steps.append(step(rows, node))
        elif name in _MODES:
            steps.append(step(F.pad, tuple(map(signed, saved(node, "padding"))), _MODES[name]))
        elif name == _CONSTANT_PAD and not steps:  # the constant is read from the tensor itself
            # The same for every tensor that is made of what the node made.
            padding = Padding(tuple(map(signed, saved(node, "pad"))))
            steps.append(step(padded, node.metadata.setdefault(_FILL_KEY, padding)))
        elif name in MASKED and getattr(node, "read_unchanged", False):
            steps.append(step(dropped_out, node.mask))
        elif name not in _SAME:
            break
        node, output = node.next_functions[-1 if name == _CAT else 0]
        if output:  # rules speak of first outputs
            return Expression(None, None)
    return Expression(node, None if node is None else rule_of(node), tuple(reversed(steps)))


def may_be_repeated(expression: Expression, rule: Rule, *, of_casts_only: bool = False) -> bool:
    """Whether what was done to the output of a node with `rule` may be done once more; nothing but casts may be with
    `of_casts_only`.

    Between its making and its copy a tensor may be changed behind autograd's back. Where the node keeps it, reading it
    then is an error, and where there is a witness, that tells. Of a copy between two others nothing tells, but casts
    are made on the spot, by autocast or an adapter. A seeded dropout looks at the version of what it reads.
    """
    done: list[Any] = [function for function, _, _ in expression.steps]
    if of_casts_only and not _only_casts(done):
        return False
    if dropped_out in done:
        first = done.index(dropped_out)
        if not all(each in (Tensor.to, dropped_out) for each in done[first:]):
            return False
        done = done[:first]
        if rule.of_copies_only:
            return _copies(done) <= 1
    elif rule.of_copies_only:
        return _copies(done) == 1 or (not _copies(done) and Tensor.to in done)
    if _only_casts(done):
        return True
    is_one_copy = _is_cast_part(done) or (_copies(done) == 1 and Tensor.to not in done)
    return is_one_copy and is_unchanged(expression.node)


def nodes_read(expression: Expression) -> Iterator[Node]:
    """The nodes whose saved tensors `expression` reads: they say which rows were read, too."""
    yield expression.node
    for function, args, _ in expression.steps:
        if function is rows:
            yield args[-1]


def reads_parts(steps: Sequence[Step]) -> bool:
    """Whether some of the rows were read: the whole is the same for all experts."""
    return any(function in _PARTS for function, _, _ in steps)


def _only_casts(done: Sequence[Any]) -> bool:
    return all(each is Tensor.to for each in done)


def _copies(done: Sequence[Any]) -> int:
    return sum(each in _COPIES for each in done)


def _is_cast_part(done: Sequence[Any]) -> bool:
    """Whether a part was read of the output, or of a view of it, and then at most cast."""
    last = max((i for i, each in enumerate(done) if each in _PARTS), default=None)
    if last is None or not _only_casts(done[last + 1 :]):
        return False
    return _copies(done) <= 1 and Tensor.to not in done[:last]


def _is_of_one(node: Node) -> bool:
    """Whether a concatenation copied its last tensor alone, behind an empty one: a cache in its first use does."""
    last, output = node.next_functions[-1]
    if input_metadata is None or last is None:
        return False
    return bool(input_metadata(node)[0].shape == input_metadata(last)[output].shape)
