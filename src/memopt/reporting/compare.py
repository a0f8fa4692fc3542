"""Saved bytes before and after patching, side by side: plain data that the renderers print.

Blocks with the same rows are one *kind*; a model has one or a few.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memopt.patches.capabilities import Section
from memopt.reporting.account import Account, Part, SavedStorage
from memopt.reporting.causes import CAUSES
from memopt.reporting.step import Step
from memopt.reporting.timeline import KINDS, Kind
from memopt.reporting.training import Training

#: Names of the parts, in the order in which a forward meets them.
PARTS: dict[Part, str] = {
    "embeddings": "before the blocks (embeddings)",
    "block": "blocks",
    "shared": "held by several blocks",
    "between": "between the blocks",
    "head": "after the blocks (head and loss)",
}
UNSEEN = "held outside of saved tensors"
_SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


@dataclass(frozen=True)
class Row:
    """Saved tensors of one cause, dtype and shape, before and after patching."""

    cause: str
    dtype: str
    shape: tuple[int, ...]
    before: int
    after: int
    count_before: int
    count_after: int

    @property
    def what(self) -> str:
        """``30 x bf16 1x512x576``."""
        count = self.count_before or self.count_after
        text = f"{_SHORT_DTYPES.get(self.dtype, self.dtype)} {'x'.join(map(str, self.shape))}".rstrip()
        return text if count == 1 else f"{count} x {text}"


@dataclass(frozen=True)
class BlockKind:
    """Blocks that save the same."""

    blocks: tuple[str, ...]
    rows: tuple[Row, ...]
    """Of one such block."""

    @property
    def title(self) -> str:
        """``30 blocks alike, layers.0 to layers.29: each of them``."""
        first, last = self.blocks[0], self.blocks[-1]
        return first if first == last else f"{len(self.blocks)} blocks alike, {first} to {last}: each of them"

    @property
    def before(self) -> int:
        return sum(row.before for row in self.rows)

    @property
    def after(self) -> int:
        return sum(row.after for row in self.rows)


@dataclass(frozen=True)
class Comparison:
    """What one training step saves for backward, stock and patched."""

    model: str
    model_class: str
    recipe: str
    training: Training
    before: Account
    after: Account
    notes: tuple[str, ...] = ()
    inputs: Mapping[str, Any] | None = None
    """Form of the given batch (`memopt.walk.calls.batch.describe`); None where one was made."""
    sections: tuple[Section, ...] = ()
    """Sections that patches add."""
    step: Step | None = field(default=None, repr=False, compare=False)
    """What was traced."""

    def __str__(self) -> str:
        """What `memopt report` prints."""
        from memopt.reporting.tables import comparison_tables
        from memopt.reporting.text import as_text

        return as_text(comparison_tables(self))

    @property
    def change(self) -> float:
        """Relative change of the bytes: -0.47 for 47 % less; 0 where nothing is saved."""
        return self.after.total / self.before.total - 1 if self.before.total else 0.0

    def kinds(self) -> tuple[BlockKind, ...]:
        """Kinds of blocks, in the order of their first block."""
        kinds: dict[tuple[Row, ...], list[str]] = {}
        for block in self.before.blocks:
            rows = compare_rows(self.before.of_block(block), self.after.of_block(block))
            kinds.setdefault(rows, []).append(block)
        return tuple(BlockKind(tuple(blocks), rows) for rows, blocks in kinds.items())

    def parts(self) -> tuple[tuple[str, int, int], ...]:
        """(part of the model, bytes before, bytes after), without parts that save nothing."""
        before, after = self.before.per_part(), self.after.per_part()
        parts = [(name, before.get(part, 0), after.get(part, 0)) for part, name in PARTS.items()]
        parts.append((UNSEEN, self.before.unseen, self.after.unseen))
        return tuple(part for part in parts if part[1] or part[2])

    @property
    def has_step(self) -> bool:
        """Whether the peak of a step is known, stock and patched."""
        return self.before.step is not None and self.after.step is not None

    def at_peak(self) -> tuple[tuple[Kind, str, int, int], ...]:
        """(kind, where, bytes before, bytes after) of what lives at the peak of the step, in the order of `KINDS`.

        Where: ``blocks``, else the module whose forward or backward allocated it; empty outside of modules.
        """
        sizes: dict[tuple[Kind, str], list[int]] = {}
        for side, account in enumerate((self.before, self.after)):
            for life, kind in account.step.at_peak if account.step else ():
                place = "blocks" if account.block_of(life.module) else life.module
                sizes.setdefault((kind, place), [0, 0])[side] += life.nbytes
        order = list(KINDS)
        rows = ((*key, before, after) for key, (before, after) in sizes.items())
        return tuple(sorted(rows, key=lambda row: (order.index(row[0]), -max(row[2:]))))

    def rest(self) -> tuple[Row, ...]:
        """What is saved outside of single blocks."""
        outside = ([each for each in account.storages if each.part != "block"] for account in (self.before, self.after))
        return compare_rows(*outside)


def compare_rows(before: Sequence[SavedStorage], after: Sequence[SavedStorage]) -> tuple[Row, ...]:
    """Rows in the order of `CAUSES`, larger ones first. Weight copies of all shapes are one row."""
    sides: list[dict[tuple[str, str, tuple[int, ...]], list[int]]] = []
    for storages in (before, after):
        sizes: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}
        for entry in storages:
            shape = () if entry.cause == "weight copy" else entry.shape
            sizes.setdefault((entry.cause, entry.dtype, shape), []).append(entry.nbytes)
        sides.append(sizes)
    rows = []
    for key in {**sides[0], **sides[1]}:
        sizes_before, sizes_after = sides[0].get(key, []), sides[1].get(key, [])
        rows.append(Row(*key, sum(sizes_before), sum(sizes_after), len(sizes_before), len(sizes_after)))
    order = {str(cause): place for place, cause in enumerate(CAUSES)}
    return tuple(sorted(rows, key=lambda row: (order[row.cause], -max(row.before, row.after), row.dtype, row.shape)))
