"""The answer of a report: whether a step fits, in six lines, and the ways to train beside each other. Plain data."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_GIB = 1 << 30
#: Parts of a peak in a user's words; what is not here is in "other".
_GROUPS = {
    "weights": ("weights", "weight copies"),
    "gradients": ("gradients",),
    "optimizer": ("optimizer states", "optimizer transients"),
    "saved activations": ("saved tensors", "recomputed", "activation gradients"),
    "loss": ("loss",),
}


@dataclass(frozen=True)
class Largest:
    """The largest batch, or the longest sequence, that fits."""

    value: int
    """0 if not even the smallest fits."""
    is_all: bool = False
    """Whether it is the most that was looked for: the positions of the model, or the limit of the search."""

    def __str__(self) -> str:
        return f"{self.value}{' or more' if self.is_all else ''}" if self.value else "none"


@dataclass(frozen=True)
class Way:
    """One way to train, and what it takes. Bytes of one device."""

    name: str
    how: str
    """What to do for it."""
    total: int
    """At the peak of a step: what the process takes of the device."""
    margin: int
    """How far `total` may be off."""
    peak: int
    """Of live storages."""
    moment: str
    where: str
    parts: dict[str, int]
    """What lives at the peak."""
    flops: float
    """Of the step, relative to the stock step's."""
    moved: float
    """Bytes that its operations read and write, relative to the stock step's."""
    gradient_error: float = 0.0
    """0: exact but for rounding."""
    batch: Largest | None = None
    seq: Largest | None = None

    def fits(self, memory: int) -> bool:
        """Whether it fits, margin included."""
        return self.total + self.margin <= memory

    @property
    def accuracy(self) -> str:
        """Of its gradients."""
        return f"approximate, off by up to {self.gradient_error:.0%}" if self.gradient_error else "exact"

    def by_what(self) -> dict[str, int]:
        """Bytes at the peak, in a user's words."""
        found = {name: sum(self.parts.get(part, 0) for part in parts) for name, parts in _GROUPS.items()}
        return {**found, "other": self.total - sum(found.values())}


@dataclass(frozen=True)
class Headline:
    """What a report says first."""

    model: str
    model_class: str
    recipe: str
    training: str
    stock: Way
    patched: Way
    card: str | None = None
    memory: int | None = None
    """Bytes of the card; None if none was named."""
    others: tuple[Way, ...] = ()
    """Further ways, in the order of the table."""
    remedy: str = ""
    notes: tuple[str, ...] = ()
    approximate: bool = False
    """Whether the recipe changes gradients beyond rounding."""

    def ways(self) -> tuple[Way, ...]:
        """Every row of the table."""
        return self.stock, self.patched, *self.others

    def lines(self) -> Iterator[tuple[str, str]]:
        """(what, answer), at most six."""
        stock, patched = self.stock, self.patched
        if self.memory is not None:
            yield "fits", self._fits(self.memory)
        yield "peak", f"{gib(patched.total)} {_when(patched)}; stock {gib(stock.total)} {_when(stock)}"
        number, unit = self._numbers()
        yield "of it", ", ".join(f"{name} {number(size)}" for name, size in patched.by_what().items()) + unit
        yield "saved", self._saved()
        if patched.batch is not None and stock.batch is not None:
            yield "largest", self._largest()
        if self.remedy:
            yield "next", self.remedy

    def _numbers(self) -> tuple[Callable[[int], str], str]:
        """What writes the parts of a peak, and their unit: a small model's are hundredths of a GiB."""
        return (_mebi, " MiB") if self.stock.total < 2 * _GIB else (_number, " GiB")

    def _fits(self, memory: int) -> str:
        verdicts = [("with memopt", self.patched), ("stock", self.stock)]
        said = []
        for name, way in verdicts:
            spare = memory - way.total - way.margin
            verdict, rest = ("yes", "to spare") if spare >= 0 else ("no", "too much")
            said.append(f"{name} {verdict} ({gib(abs(spare))} {rest})")
        return f"{self.card}: {', '.join(said)}"

    def _saved(self) -> str:
        before, after = self.stock.by_what(), self.patched.by_what()
        saved = self.stock.total - self.patched.total
        share = saved / self.stock.total if self.stock.total else 0.0
        names = [name for name in ("saved activations", "loss") if before[name] != after[name]]
        number, unit = self._numbers()
        changed = ", ".join(f"{name} {number(before[name])} -> {number(after[name])}" for name in names)
        of_all = f"{gib(saved)} of {gib(self.stock.total)} ({100 * share:.0f} %)"
        return f"{of_all}: {changed}{unit}" if changed else of_all

    def _largest(self) -> str:
        said = [f"batch {self.patched.batch} (stock {self.stock.batch})"]
        if self.patched.seq is not None and self.stock.seq is not None:
            said.append(f"sequence {self.patched.seq} (stock {self.stock.seq})")
        return ", ".join(said)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "card": None if self.memory is None else {"name": self.card, "memory_bytes": self.memory},
            "ways": [_way_dict(way, self.memory) for way in self.ways()],
            "remedy": self.remedy or None,
        }


def _way_dict(way: Way, memory: int | None) -> dict[str, Any]:
    return {
        "name": way.name,
        "how": way.how,
        "total_bytes": way.total,
        "margin_bytes": way.margin,
        "peak_bytes": way.peak,
        "moment": way.moment,
        "module": way.where,
        "parts": way.parts,
        "extra_flops": way.flops - 1,
        "extra_bytes_moved": way.moved - 1,
        "gradient_error": way.gradient_error,
        "fits": None if memory is None else way.fits(memory),
        "largest_batch": None if way.batch is None else way.batch.value,
        "larger_batch_may_fit": None if way.batch is None else way.batch.is_all,
        "longest_sequence": None if way.seq is None else way.seq.value,
    }


def _when(way: Way) -> str:
    moment = {"loss": "in the loss", "optimizer step": "in the optimizer's step"}.get(way.moment, f"in {way.moment}")
    if not way.where or way.moment not in ("forward", "backward"):
        return moment
    # A block is near enough, and adapters wrap the model in a name of their own.
    block = re.match(r"(?:base_model\.model\.)?(.+?\.\d+(?=\.|$)|.+)", way.where)
    return f"{moment} ({block[1] if block else way.where})"


def _number(nbytes: int) -> str:
    gib = nbytes / _GIB
    return f"{gib:.1f}" if gib >= 0.95 or not nbytes else f"{gib:.2f}" if gib >= 0.005 else "0.00"


def _mebi(nbytes: int) -> str:
    mib = nbytes / (1 << 20)
    return f"{mib:.0f}" if mib >= 9.5 or not nbytes else f"{mib:.1f}"


def gib(nbytes: int) -> str:
    """``20.0 GiB``, below one ``534 MiB``."""
    return f"{_number(nbytes)} GiB" if abs(nbytes) >= _GIB else f"{nbytes / (1 << 20):.0f} MiB"
