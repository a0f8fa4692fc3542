"""Takes alike blocks out of a model, so that a walk or a trace of a few blocks holds for all."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn

#: Groups of alike blocks that remain: two at the ends, two between.
LEAST_GROUPS = 4
_LONGEST_GROUP = 8
_POSITION = re.compile(r"(idx|index|_id|number)$")


@dataclass(frozen=True)
class Run:
    """The blocks of one list, with one stretch of alike blocks that were left out."""

    names: tuple[str, ...]
    """All blocks of the list, in order, without blocks that an earlier run left out."""
    start: int
    """Place of the first block that was left out."""
    group: int
    """Blocks in a group; groups are alike."""
    left_out: int
    """Number of blocks that were left out: a multiple of `group`."""

    def like(self, place: int) -> int:
        """The place of the remaining block that is like the left-out block at `place`."""
        return self.start - self.group + (place - self.start) % self.group


def take_out(
    model: nn.Module, blocks: Sequence[str], groups: int = LEAST_GROUPS, *, several: bool = False
) -> tuple[Run, ...]:
    """Take alike blocks out of `model`, which keeps `groups` groups of them and all blocks that are not alike.

    Returns the runs, in the order in which their left-out blocks have to be put back.

    Args:
        model: without adapters; changed in place.
        blocks: names of its repeated blocks.
        groups: at least :data:`LEAST_GROUPS`, so that observations of these blocks hold for the others.
        several: leave out blocks of every run of alike blocks in a list; by default, of the longest run only.
    """
    lists: dict[str, list[str]] = {}
    for name in blocks:
        lists.setdefault(name.rpartition(".")[0], []).append(name)
    runs = []
    for parent, names in lists.items():
        holder = model.get_submodule(parent)
        if not isinstance(holder, nn.ModuleList) or _share(holder):
            continue
        signatures = [_signature(model.get_submodule(name)) for name in names]
        while (run := _run_of(tuple(names), signatures, groups)) is not None:
            those = slice(run.start, run.start + run.left_out)
            for name in run.names[those]:
                del holder._modules[name.rpartition(".")[2]]
            del names[those], signatures[those]
            runs.append(run)
            if not several:
                break
    return tuple(reversed(runs))


def _share(blocks: nn.ModuleList) -> bool:
    """Whether two of `blocks` have a tensor, or themselves, in common."""
    each = [{id(tensor) for tensor in (*block.parameters(), *block.buffers())} for block in blocks]
    return len(set().union(*each)) < sum(map(len, each)) or len(set(map(id, blocks))) < len(blocks)


def places(names: Sequence[str]) -> Callable[[str], int]:
    """Module -> place among `names` of the block that it is or lies in, adapters' prefixes aside; -1 outside."""

    @cache
    def place(module: str) -> int:
        return next((at for at, name in enumerate(names) if f".{name}." in f".{module}."), -1)

    return place


def _run_of(names: tuple[str, ...], signatures: Sequence[Hashable], groups: int) -> Run | None:
    """The run from which most blocks can be left out; None if that is at most one block."""
    best: Run | None = None
    for group in range(1, _LONGEST_GROUP + 1):
        start = 0
        while start < len(names):
            end = min(start + group, len(names))
            while end < len(names) and signatures[end] == signatures[end - group]:
                end += 1
            spare = ((end - start) // group - groups) * group
            if spare > (best.left_out if best else 1):
                best = Run(names, start + (groups - 1) * group, group, spare)
            start = max(end - group + 1, start + 1)
    return best


def _signature(block: nn.Module) -> Hashable:
    """A key of a block's kind: its modules with their settings and parameters, whatever its place in the list."""
    return tuple(
        (
            name,
            type(module),
            _settings(vars(module)),
            _settings(_state(vars(module).get("_memopt")), deep=1),
            tuple(
                (key, each.shape, each.dtype, each.requires_grad)
                for key, each in module._parameters.items()
                if each is not None
            ),
        )
        for name, module in block.named_modules()
    )


def _state(rewrite: object) -> dict[str, Any]:
    """The fields of the object that a patch stored on a module: a dataclass, or a plain value. Fields that do not count
    when dataclasses are compared do not count here."""
    fields = getattr(rewrite, "__dataclass_fields__", None)
    if fields is None:
        return vars(rewrite) if hasattr(rewrite, "__dict__") else {"": rewrite}
    return {name: getattr(rewrite, name, None) for name, each in fields.items() if each.compare}


def _settings(values: dict[str, Any], deep: int = 0) -> Hashable:
    found: list[Hashable] = []
    for key, value in sorted(values.items(), key=lambda item: item[0]):
        if isinstance(value, str):
            found.append((key, re.sub(r"\d+", "#", value)))
        elif value is None or (isinstance(value, int | float) and not _POSITION.search(key)):
            found.append((key, value))
        elif deep and hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
            found.append((key, type(value), _settings(_state(value), deep - 1)))
    return tuple(found)
