"""From a tensor that holds the values of another, or a part of them, cast, padded, dropped out or in another layout, to
the node that made those, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt.recompute_rules import MASKED, Node, rule_of
from memopt.saved.rules import signed
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
#: Nodes that `source_of` looks through, beside those of dropouts.
_STEPS = frozenset({_CAST, _CLONE, _CAT, _TRANSPOSE, _PERMUTE, _CONSTANT_PAD, _INDEX, _SELECT, *_VIEWS, *_MODES})

#: What was done to a tensor on its way: ("cast", dtype), ("clone", None), ("view", size), ("transpose", (a, b)),
#: ("permute", dims), ("select", (dim, index)), ("rows", Node), ("reflect" or "replicate", pads), ("constant", Padding)
#: or ("mask", Mask); pads as `torch.nn.functional.pad` takes them, the node one that saved the indices of its rows.
Step = tuple[str, Any]
_COPIES = frozenset({"clone", "constant", "rows", *_MODES.values()})
_PARTS = frozenset({"rows", "select"})


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


def _sides(pads: Sequence[int]) -> list[tuple[int, tuple[int, int]]]:
    """(dimension, counted from behind; what was added before and after it)"""
    return [(-1 - i, (pads[2 * i], pads[2 * i + 1])) for i in range(len(pads) // 2)]


@dataclass(frozen=True)
class Source:
    """Where the values of a tensor were made."""

    node: Node
    """The node that made them; None if there is none that a rule could speak of."""
    steps: tuple[Step, ...]
    """What was done to its output since, in order."""

    @property
    def casts(self) -> int:
        return sum(what == "cast" for what, _ in self.steps)

    @property
    def copies(self) -> int:
        """Copies in the same dtype."""
        return sum(what in _COPIES for what, _ in self.steps)

    @property
    def reads_parts(self) -> bool:
        """Whether some of its rows were read: experts each read theirs, and the whole is the same for all."""
        return any(what in _PARTS for what, _ in self.steps)

    @property
    def is_cast_part(self) -> bool:
        """Whether a part was read from it, or from a view of it, and then at most cast."""
        last = max((i for i, (what, _) in enumerate(self.steps) if what in _PARTS), default=None)
        if last is None or any(what != "cast" for what, _ in self.steps[last + 1 :]):
            return False
        return self.copies <= 1 and not any(what in ("cast", "mask") for what, _ in self.steps[:last])

    @property
    def is_only_cast(self) -> bool:
        return all(what == "cast" for what, _ in self.steps)

    @property
    def before_dropout(self) -> Source | None:
        """What the first dropout on the way read, which was as it had been made; None where there was no dropout."""
        first = self._first_dropout
        return None if first is None else Source(self.node, self.steps[:first])

    @property
    def is_only_cast_since_dropout(self) -> bool:
        """Whether nothing but casts and dropouts came after the first dropout."""
        return all(what in ("cast", "mask") for what, _ in self.steps[self._first_dropout :])

    @property
    def _first_dropout(self) -> int | None:
        return next((i for i, (what, _) in enumerate(self.steps) if what == "mask"), None)


_is_step_type: dict[type, bool] = {}


def may_have_rule(node: Node) -> bool:
    """Whether `source_of` may find a node with a rule: the same way, without noting what was done on it."""
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


def source_of(node: Node) -> Source:
    """Where the output of `node` comes from, below casts, dropouts, clones, pads and the views between them.

    Autocast and adapters cast; attention's output is copied into another layout for the linear behind it; convolutions
    with borders of their own read a padded copy; adapters read a dropped-out one.
    """
    steps: list[Step] = []
    while node is not None:
        name = node.name()
        if name == _CAST and input_metadata is not None:
            steps.append(("cast", input_metadata(node)[0].dtype))
        elif name == _CLONE or (name == _CAT and _is_of_one(node)):
            steps.append(("clone", None))
        elif name in _VIEWS and input_metadata is not None:
            steps.append(("view", tuple(input_metadata(node)[0].shape)))
        elif name == _TRANSPOSE:
            steps.append(("transpose", (signed(saved(node, "dim0")), signed(saved(node, "dim1")))))
        elif name == _PERMUTE:
            steps.append(("permute", tuple(map(signed, saved(node, "dims")))))
        elif name == _SELECT:
            steps.append(("select", (signed(saved(node, "dim")), signed(saved(node, "index")))))
        elif name == _INDEX:
            steps.append(("rows", node))
        elif name in _MODES:
            steps.append((_MODES[name], tuple(map(signed, saved(node, "padding")))))
        elif name == _CONSTANT_PAD and not steps:  # the constant is read from the tensor itself
            # The same for every tensor that is made of what the node made.
            padding = Padding(tuple(map(signed, saved(node, "pad"))))
            steps.append(("constant", node.metadata.setdefault(_FILL_KEY, padding)))
        elif name in MASKED and getattr(node, "read_unchanged", False):
            steps.append(("mask", node.mask))
        elif name not in _SAME:
            break
        node, output = node.next_functions[-1 if name == _CAT else 0]
        if output:  # rules speak of first outputs
            return Source(None, ())
    return Source(node, tuple(reversed(steps)))


def _is_of_one(node: Node) -> bool:
    """Whether a concatenation copied its last tensor alone, behind an empty one: a cache in its first use does."""
    last, output = node.next_functions[-1]
    if input_metadata is None or last is None:
        return False
    return bool(input_metadata(node)[0].shape == input_metadata(last)[output].shape)


def done_again(value: Tensor, step: Step) -> Tensor:
    """`value` after one step; where a clone's copy lies in memory is the caller's affair."""
    what, how = step
    if what == "cast":
        return value.to(how)
    if what == "clone":
        return value
    if what == "view":
        return value.reshape(how)
    if what == "constant":
        padding: Padding = how
        return padding.around(value)
    if what == "mask":
        mask: Mask = how
        return mask.on(value)
    if what == "select":
        return value.select(*how)
    if what == "rows":
        rows: Tensor = torch.ops.aten.index(value, saved(how, "indices"))
        return rows
    if what in ("reflect", "replicate"):
        return F.pad(value, how, mode=what)
    return value.transpose(*how) if what == "transpose" else value.permute(how)
