"""Saved bytes before and after patching, side by side: plain data, and the tables that `memopt report -v` prints.

Blocks with the same rows are one *kind*; a model has one or a few. The tables fit 80 columns and shorten no name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from memopt.patches.capabilities import Reports, Section
from memopt.patches.registry import having
from memopt.reporting.text import as_text, changed, line
from memopt.trace import events
from memopt.trace.account import Account, Part, SavedStorage
from memopt.trace.causes import CAUSES
from memopt.trace.training import Step, Training

#: Names of the parts, in the order of the forward.
PARTS: dict[Part, str] = {
    "embeddings": "before the blocks (embeddings)",
    "block": "blocks",
    "shared": "held by several blocks",
    "between": "between the blocks",
    "head": "after the blocks (head and loss)",
}
#: Parts that live at the peak, in the order of its table -> the name in the JSON document, the words in the table.
_AT_PEAK: dict[events.Part, tuple[str, str]] = {
    "saved tensors": ("saved", "saved by the forward"),
    "loss": ("logits", "logits and what is computed from them"),
    "recomputed": ("recomputed", "recomputed in backward"),
    "activation gradients": ("gradients", "gradients of activations"),
    "temporaries": ("temporaries", "temporaries of one operation"),
    "weight copies": ("weight_copies", "copies of weights"),
}
UNSEEN = "held outside of saved tensors"
SCOPE = (
    "Counted: activations that one forward saves for backward, each storage once; for the peak, every storage that "
    "lives then. Not counted: weights, their gradients, optimizer states, inputs, and what kernels use inside."
)
#: Rows below this share of a unit are summed in one line.
_SMALL = 0.02
#: Rows of the peak's table below this share of the peak are summed in one line.
_SMALL_OF_PEAK = 0.005
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
        """Number, dtype and shape of the tensors: ``30 x bf16 1x512x576``."""
        count = self.count_before or self.count_after
        text = f"{_SHORT_DTYPES.get(self.dtype, self.dtype)} {'x'.join(map(str, self.shape))}".rstrip()
        return text if count == 1 else f"{count} x {text}"


@dataclass(frozen=True)
class BlockKind:
    """Blocks whose saved tensors are alike."""

    blocks: tuple[str, ...]
    rows: tuple[Row, ...]
    """The rows of one such block."""

    @property
    def title(self) -> str:
        """Heading of the table: ``30 blocks alike, layers.0 to layers.29: each of them``."""
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
    """The tensors that one training step saves for backward, stock and patched."""

    model: str
    model_class: str
    recipe: str
    training: Training
    before: Account
    after: Account
    notes: tuple[str, ...] = ()
    inputs: Mapping[str, Any] | None = None
    """Description of the given batch (`memopt.walk.calls.batch.describe`); None if inputs were guessed."""
    sections: tuple[Section, ...] = ()
    """Sections that patches add."""
    step: Step | None = field(default=None, repr=False, compare=False)
    """The step that was traced."""

    def __str__(self) -> str:
        """The tables that `memopt report -v` prints."""
        return as_text(comparison_tables(self))

    __repr__ = __str__

    @property
    def change(self) -> float:
        """Relative change of the bytes: -0.47 for 47 % less; 0 if nothing is saved."""
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

    @property
    def traces(self) -> tuple[events.Trace | None, events.Trace | None]:
        """The whole step, stock and patched; None if its backward fails."""
        return self.before.trace, self.after.trace

    def at_peak(self) -> tuple[tuple[events.Part, str, int, int], ...]:
        """(part, where, bytes before, bytes after) of the live bytes at the peak of the step, in the table's order.
        Where: ``blocks``, else the module whose forward or backward allocated it; empty outside of modules."""
        sizes: dict[tuple[events.Part, str], list[int]] = {}
        for side, account in enumerate((self.before, self.after)):
            for storage in account.step.peak.alive if account.step else ():
                place = "blocks" if account.block_of(storage.module) else storage.module
                sizes.setdefault((storage.part, place), [0, 0])[side] += storage.nbytes
        order = list(_AT_PEAK)
        rows = ((*key, before, after) for key, (before, after) in sizes.items())
        return tuple(sorted(rows, key=lambda row: (order.index(row[0]), -max(row[2:]))))

    def rest(self) -> tuple[Row, ...]:
        """Rows of the tensors that are saved outside of single blocks."""
        outside = ([each for each in account.storages if each.part != "block"] for account in (self.before, self.after))
        return compare_rows(*outside)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form: bytes as integers, keys only ever added."""
        return {
            "model": {"id": self.model, "class": self.model_class},
            "recipe": self.recipe,
            "training": {
                key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self.training).items()
            },
            "inputs": self.inputs,
            "unit_bytes": self.before.unit,
            "before": _account(self.before),
            "after": _account(self.after),
            "block_kinds": [_kind(kind) for kind in self.kinds()],
            "outside_blocks": [_row(row) for row in self.rest()],
            "parts": [{"part": name, "before": before, "after": after} for name, before, after in self.parts()],
            "summary": {"before": self.before.total, "after": self.after.total, "change": self.change},
            "step": {"before": _step(self.before), "after": _step(self.after)},
            **{patch.section: None for patch in having(Reports) if patch.section},
            **{section.key: section.to_dict() for section in self.sections},
            "notes": list(self.notes),
        }


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


def comparison_tables(comparison: Comparison) -> Iterator[RenderableType]:
    """In order: title, a table for each kind of block, the rest of the model, the sums, notes on the counting."""
    unit = comparison.before.unit
    yield line(f"{comparison.model} ({comparison.model_class}), recipe {comparison.recipe}", "bold")
    yield line(f"{comparison.training}")
    for kind in comparison.kinds():
        yield Text()
        yield line(kind.title, "bold")
        yield _row_table(kind.rows, unit, total="one block")
    if rest := comparison.rest():
        yield Text("\nOutside of single blocks", style="bold")
        yield _row_table(rest, unit, total="together")
    yield Text("\nWhole model", style="bold")
    yield _part_table(comparison)
    if comparison.has_step:
        yield Text("\nPeak of a step", style="bold")
        yield _peak_table(comparison)
    yield Text(f"\n{summary(comparison)}\n", style="bold")
    if unit:
        yield Text(f"1 unit (u) = {_mib(unit)} MiB: the hidden state of all tokens in the compute dtype.")
    yield Text(SCOPE)
    for note in comparison.notes:
        yield line(note)
    for section in comparison.sections:
        yield Text()
        yield from map(line, section.lines())


def summary(comparison: Comparison) -> str:
    """The change of the saved bytes and, if it is known, of the peak of a step."""
    accounts = (comparison.before, comparison.after)
    lines = [_change("saved for backward", *(account.total for account in accounts))]
    if comparison.has_step:
        lines.append(_change("peak of a step", *(account.step.peak.nbytes for account in accounts if account.step)))
    return "\n".join(lines)


def _change(what: str, before: int, after: int) -> str:
    return f"{what}: {_size(before)} -> {_size(after)} ({changed(before, after)})"


def _row_table(rows: Sequence[Row], unit: int, *, total: str) -> Table:
    table = _table("saved as", "what", numbers=("before u", "MiB", "after u", "MiB"))
    small = [row for row in rows if max(row.before, row.after) < _SMALL * unit]
    for row in rows:
        if row not in small:
            table.add_row(row.cause, row.what, *_cells(row.before, row.after, unit))
    if small:
        sums = (sum(row.before for row in small), sum(row.after for row in small))
        table.add_row("small tensors", "statistics and the like", *_cells(*sums, unit))
    table.add_section()
    sums = (sum(row.before for row in rows), sum(row.after for row in rows))
    table.add_row(total, "", *_cells(*sums, unit), style="bold", end_section=True)
    return table


def _part_table(comparison: Comparison) -> Table:
    table = _table("part", numbers=("before MiB", "after MiB", "change"))
    for name, before, after in comparison.parts():
        label = f"{len(comparison.before.blocks)} {name}" if name == "blocks" else name
        table.add_row(label, _mib(before), _mib(after), changed(before, after))
    table.add_section()
    before, after = comparison.before.total, comparison.after.total
    table.add_row("total", _mib(before), _mib(after), changed(before, after), style="bold", end_section=True)
    return table


def _peak_table(comparison: Comparison) -> Table:
    table = _table("lives at the peak", "where", numbers=("before MiB", "after MiB"))
    steps = [account.step for account in (comparison.before, comparison.after) if account.step]
    small = [0, 0]
    for part, place, before, after in comparison.at_peak():
        if max(before, after) < _SMALL_OF_PEAK * max(step.peak.nbytes for step in steps):
            small = [small[0] + before, small[1] + after]
        else:
            table.add_row(_AT_PEAK[part][1], place or "outside of modules", _mib(before), _mib(after))
    if any(small):
        table.add_row("small tensors", "", *map(_mib, small))
    table.add_section()
    peaks = [_mib(step.peak.nbytes) for step in steps]
    table.add_row("total", "", *peaks, style="bold", end_section=True)
    return table


def _table(*words: str, numbers: Sequence[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for place, header in enumerate(words):
        table.add_column(header, overflow="fold", no_wrap=place == 0)
    for header in numbers:
        table.add_column(header, justify="right", no_wrap=True)
    return table


def _cells(before: int, after: int, unit: int) -> tuple[str, str, str, str]:
    def units(nbytes: int) -> str:
        return f"{nbytes / unit:.2f}" if unit else "-"

    return units(before), _mib(before), units(after), _mib(after)


def _mib(nbytes: int) -> str:
    mib = nbytes / 2**20
    if not nbytes:
        return "0"
    return f"{mib:.0f}" if mib >= 1000 else f"{mib:.1f}" if mib >= 10 else f"{mib:.2f}"


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{_mib(nbytes)} MiB"


def _account(account: Account) -> dict[str, Any]:
    return {
        "total": account.total,
        "unseen": account.unseen,
        "per_block": account.per_block(),
        "per_cause": account.per_cause(),
    }


def _step(account: Account) -> dict[str, Any] | None:
    """The peak of the step; None if it is not known."""
    step = account.step
    if step is None:
        return None
    per_place = Counter[str]()
    for storage in step.peak.alive:
        per_place[account.block_of(storage.module) or storage.module] += storage.nbytes
    return {
        "after_forward": step.kept,
        "peak": step.peak.nbytes,
        "peak_in": step.peak.where,
        "per_kind": {name: step.peak.parts[part] for part, (name, _) in _AT_PEAK.items()},
        "per_module": dict(per_place.most_common()),
        "most_of_kind": {name: step.most[part] for part, (name, _) in _AT_PEAK.items()},
    }


def _kind(kind: BlockKind) -> dict[str, Any]:
    rows = [_row(row) for row in kind.rows]
    return {"blocks": list(kind.blocks), "before": kind.before, "after": kind.after, "rows": rows}


def _row(row: Row) -> dict[str, Any]:
    return {
        "cause": row.cause,
        "dtype": row.dtype,
        "shape": list(row.shape),
        "before": {"bytes": row.before, "tensors": row.count_before},
        "after": {"bytes": row.after, "tensors": row.count_after},
    }
