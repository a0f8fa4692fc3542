"""The first lines of a report: whether a step fits, and the ways to train compared. Plain data."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from memopt.plan.shipped import EXACT
from memopt.prediction.setup import GIB, MIB

#: Parts of a peak in a user's words; all parts not listed here count as "other".
_GROUPS = {
    "weights": ("weights", "weight copies"),
    "gradients": ("gradients",),
    "optimizer": ("optimizer states", "optimizer transients"),
    "saved activations": ("saved tensors", "recomputed", "activation gradients"),
    "loss": ("loss",),
}


#: Differences below this share of a peak count as none, since the allocator reserves whole segments.
_NOTHING = 0.002


@dataclass
class Steps:
    """The progress of the work on an answer, for a progress line."""

    what: str
    now: int = 0
    total: int = 0
    """Number of parts of the work; 0 if not known yet."""

    def __str__(self) -> str:
        return f"{self.what}, part {self.now} of {self.total}" if self.total else self.what


@dataclass(frozen=True)
class Largest:
    """The largest batch, or the longest sequence, that fits."""

    value: int
    """0 if not even the smallest fits."""
    is_all: bool = False
    """Whether `value` is the upper end of the search: the positions of the model, or another limit."""
    offloaded: int = 0
    """Bytes offloaded to CPU memory at this size."""

    def __str__(self) -> str:
        return f"{self.value}{' or more' if self.is_all else ''}" if self.value else "-"


@dataclass(frozen=True)
class Way:
    """One way to train, and its memory and work. Bytes of one device."""

    name: str
    how: str
    """The code or setting that selects this way."""
    total: int
    """Bytes of the device that the process takes at the peak of a step."""
    margin: int
    """How far `total` may be off."""
    peak: int
    """Bytes of live storages at the peak."""
    moment: str
    where: str
    parts: dict[str, int]
    """Live bytes of each part at the peak."""
    flops: float
    """FLOPs of the step, relative to the stock step."""
    moved: float
    """Bytes that the operations read and write, relative to the stock step."""
    gradient_error: float = 0.0
    """The error that an approximate recipe declares."""
    batch: Largest | None = None
    seq: Largest | None = None
    allocator: str = ""
    """How to lower the limit of PyTorch's allocator, if this way fits only so."""
    accuracy: str = EXACT
    """The accuracy of the gradients, in words."""

    @property
    def needs(self) -> int:
        """Bytes that a device has to have: the total and its margin."""
        return self.total + self.margin

    def fits(self, memory: int) -> bool:
        """Whether this way fits in `memory` bytes, margin included."""
        return self.needs <= memory

    @property
    def needs_like_total(self) -> str:
        """`needs` as a number in the unit in which `gib` prints `total`."""
        return _number(self.needs) if self.total >= GIB else _mebi(self.needs)

    def by_what(self) -> dict[str, int]:
        """Bytes at the peak, in a user's words."""
        found = {name: sum(self.parts.get(part, 0) for part in parts) for name, parts in _GROUPS.items()}
        return {**found, "other": self.total - sum(found.values())}


@dataclass(frozen=True)
class Headline:
    """The first lines of a report."""

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
    remedies: tuple[str, ...] = ()
    """Advice on what to do next, the best advice first."""
    notes: tuple[str, ...] = ()
    approximate: bool = False
    """Whether the recipe changes gradients beyond rounding."""

    @property
    def fits(self) -> bool | None:
        """Whether the patched step fits the card, margin included; None without a card."""
        return None if self.memory is None else self.patched.fits(self.memory)

    @property
    def peak_bytes(self) -> dict[str, dict[str, int]]:
        """For ``stock`` and ``memopt``: bytes of each part at the peak; they add up to the total of the process."""
        return {way.name: way.by_what() for way in (self.stock, self.patched)}

    @property
    def largest_batch(self) -> int | None:
        """Rows of the largest batch that fits with memopt, 0 if none does; None if it was not looked for."""
        return None if self.patched.batch is None else self.patched.batch.value

    @property
    def longest_sequence(self) -> int | None:
        """Tokens of the longest row that fits with memopt, 0 if none does; None if it was not looked for."""
        return None if self.patched.seq is None else self.patched.seq.value

    def ways(self) -> tuple[Way, ...]:
        """Every row of the table."""
        return self.stock, self.patched, *self.others

    def lines(self) -> Iterator[tuple[str, str]]:
        """(label, text) of each line: at most five, and the remedies."""
        stock, patched = self.stock, self.patched
        if self.memory is not None:
            yield "fits", self._fits(self.memory)
        yield "peak", f"{gib(patched.total)} {_when(patched)}; stock {gib(stock.total)} {_when(stock)}"
        number, unit = self._numbers()
        yield "of it", ", ".join(f"{name} {number(size)}" for name, size in patched.by_what().items()) + unit
        yield "saved", self._saved()
        if patched.batch is not None and stock.batch is not None:
            yield "largest", self._largest()
        elif patched.seq is not None:
            yield "longest", self._longest()
        yield from (("or" if number else "next", remedy) for number, remedy in enumerate(self.remedies))

    def _numbers(self) -> tuple[Callable[[int], str], str]:
        """A function that formats the parts of a peak, and their unit: MiB for a small model."""
        return (_mebi, " MiB") if self.stock.total < 2 * GIB else (_number, " GiB")

    def _fits(self, memory: int) -> str:
        verdicts = [("with memopt", self.patched), ("stock", self.stock)]
        said = []
        for name, way in verdicts:
            spare = memory - way.needs
            verdict, rest = ("yes", "to spare") if spare >= 0 else ("no", "too much")
            said.append(f"{name} {verdict} ({gib(abs(spare))} {rest})")
        return f"{self.card}: {', '.join(said)}"

    def _saved(self) -> str:
        before, after = self.stock.by_what(), self.patched.by_what()
        saved = self.stock.total - self.patched.total
        if saved <= _NOTHING * self.stock.total:
            return self._nothing()
        share = saved / self.stock.total
        number, unit = self._numbers()
        names = [name for name in ("saved activations", "loss") if number(before[name]) != number(after[name])]
        changed = ", ".join(f"{name} {number(before[name])} -> {number(after[name])}" for name in names)
        of_all = f"{gib(saved)} of {gib(self.stock.total)} ({100 * share:.0f} %)"
        return f"{of_all}: {changed}{unit}" if changed else of_all

    def _nothing(self) -> str:
        """Why memopt saves nothing here."""
        stock, patched = self.stock, self.patched
        if patched.peak > stock.peak * (1 + _NOTHING):
            more = gib(patched.peak - stock.peak)
            return f"nothing: with memopt {more} more live at the peak, {_when(patched)}; train this without memopt"
        fixed = gib(sum(patched.by_what()[name] for name in ("weights", "gradients", "optimizer")))
        why = f"nothing: the peak is {_when(patched)}, where weights, gradients and optimizer take {fixed}"
        held = patched.total - stock.total
        if held <= _NOTHING * stock.total:
            return why
        return (
            f"{why}; with memopt the allocator holds {gib(held)} more in partly used segments "
            "(PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True avoids them)"
        )

    def _largest(self) -> str:
        stock, patched = self.stock, self.patched
        said = [f"batch {patched.batch} (stock {stock.batch})"]
        if patched.batch is not None and not patched.batch.value:
            of_stock = f"stock {stock.batch}" if stock.batch and stock.batch.value else "nor does stock"
            said = [f"does not fit at batch 1 ({of_stock})"]
        if patched.seq is not None and stock.seq is not None and (patched.seq.value or stock.seq.value):
            said.append(f"sequence {patched.seq} (stock {stock.seq})")
        return ", ".join(said)

    def _longest(self) -> str:
        """Each exact way that fits longer sequences than all ways with fewer FLOPs, the longest first."""
        said: list[str] = []
        most = 0
        for way in sorted(self.ways(), key=lambda way: (way.flops, way is not self.patched)):
            if way.seq is not None and way.seq.value > most and way.accuracy == EXACT:
                most, waits = way.seq.value, f" ({gib(way.seq.offloaded)} of CPU memory)" if way.seq.offloaded else ""
                said.insert(0, f"{way.name} {way.seq} tokens{waits}")
        return "; ".join(said) or f"no way fits {self.card}, at any length"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "card": None if self.memory is None else {"name": self.card, "memory_bytes": self.memory},
            "ways": [_way_dict(way, self.memory) for way in self.ways()],
            "remedy": self.remedies[0] if self.remedies else None,
            "remedies": list(self.remedies),
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
        "gradients": way.accuracy,
        "fits": None if memory is None else way.fits(memory),
        "largest_batch": None if way.batch is None else way.batch.value,
        "larger_batch_may_fit": None if way.batch is None else way.batch.is_all,
        "longest_sequence": None if way.seq is None else way.seq.value,
        "longest_sequence_cpu_bytes": None if way.seq is None else way.seq.offloaded,
    }


def _when(way: Way) -> str:
    moment = {"loss": "in the loss", "optimizer step": "in the optimizer's step"}.get(way.moment, f"in {way.moment}")
    if not way.where or way.moment not in ("forward", "backward"):
        return moment
    # Print the block instead of the module inside it, and without the prefix of adapters.
    block = re.match(r"(?:base_model\.model\.)?(.+?\.\d+(?=\.|$)|.+)", way.where)
    return f"{moment} ({block[1] if block else way.where})"


def _number(nbytes: int) -> str:
    gib = nbytes / GIB
    return f"{gib:.1f}" if gib >= 0.95 or not nbytes else f"{gib:.2f}" if gib >= 0.005 else "0.00"


def _mebi(nbytes: int) -> str:
    mib = nbytes / MIB
    return f"{mib:.0f}" if mib >= 9.5 or not nbytes else f"{mib:.1f}"


def gib(nbytes: int) -> str:
    """``20.0 GiB``, or ``534 MiB`` below one GiB."""
    return f"{_number(nbytes)} GiB" if abs(nbytes) >= GIB else f"{nbytes / MIB:.0f} MiB"
