"""Cards: the memory that a process can use, and the rates of compute and memory. Plain data, without torch.

Memory is the capacity that PyTorch reports for a device ("GPU 0 has a total capacity of 23.64 GiB" in its out-of-memory
errors). It differs by a few dozen MiB between drivers; the smallest known value is used. For a card of the A10, A40,
A6000, L4 or L40 family it is the memory with ECC on, without the check bits. Rates come from the vendors' data sheets:
dense products with fp32 sums, without sparsity; fp32 without TF32, which PyTorch disables by default.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from memopt.errors import UsageError
from memopt.prediction.setup import CUBLAS_WORKSPACE_HOPPER, GIB, MIB, Setup

if TYPE_CHECKING:
    from memopt.trace.operations import Operation

#: PCI Express of 16 lanes, bytes per second in one direction, by generation.
_PCIE = {3: 15.75e9, 4: 31.5e9, 5: 63e9}
_SIZES = {"GiB": GIB, "GB": 10**9, "MiB": MIB, "MB": 10**6, "TiB": 1 << 40, "TB": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(" + "|".join(_SIZES) + r")", re.IGNORECASE)
#: Words in device names that do not distinguish cards.
_NOISE = {"nvidia", "geforce", "tesla", "amd", "instinct", "generation", "sxm", "sxm2", "sxm4", "sxm5", "hbm3", "hbm3e"}


@dataclass(frozen=True)
class Card:
    """One device."""

    name: str
    memory: int
    """Bytes that a process can use, its CUDA context included."""
    flops: float
    """FLOPs per second of 16-bit products with fp32 sums."""
    flops_fp32: float
    """FLOPs per second of fp32 products."""
    bandwidth: float
    """Bytes per second of the card's own memory."""
    link: float
    """Bytes per second between card and host memory, in one direction."""
    source: str
    """Source of the rates."""
    is_named: bool = True
    """False if only a memory size was given; the rates are then those of a common card."""

    @property
    def rates(self) -> str:
        """The name of the card whose rates these are."""
        return self.name if self.is_named else USUAL_CARD

    def nanoseconds(self, operations: Iterable[Operation]) -> int:
        """Estimated time of `operations`, which run one after another: FLOPs / rate or bytes / bandwidth, whichever is
        longer. Copies between host and card run in parallel, so the result is the longer of both totals."""
        own, copied = 0.0, 0
        for each in operations:
            rate = self.flops if each.itemsize <= 2 else self.flops_fp32
            own += max(each.flops / rate, each.nbytes / self.bandwidth)
            copied += each.copied
        return round(1e9 * max(own, copied / self.link))


def _card(name: str, gib: float, tera: float, tera_fp32: float, giga: float, pcie: int, sheet: str) -> Card:
    return Card(name, round(gib * GIB), tera * 1e12, tera_fp32 * 1e12, giga * 1e9, _PCIE[pcie], f"{sheet} data sheet")


#: Every card that can be named.
CARDS: tuple[Card, ...] = (
    _card("RTX 2080 Ti", 10.74, 53.8, 13.4, 616, 3, "NVIDIA Turing architecture"),
    _card("RTX 3060", 11.63, 25.5, 12.7, 360, 4, "NVIDIA GA10x architecture"),
    _card("RTX 3080", 9.63, 59.5, 29.8, 760, 4, "NVIDIA GA10x architecture"),
    _card("RTX 3090", 23.56, 71.0, 35.6, 936, 4, "NVIDIA GA10x architecture"),
    _card("RTX 4080", 15.57, 97.5, 48.7, 716.8, 4, "NVIDIA Ada architecture"),
    _card("RTX 4090", 23.50, 165.2, 82.6, 1008, 4, "NVIDIA Ada architecture"),
    _card("RTX 5090", 31.35, 209.5, 104.8, 1792, 5, "NVIDIA RTX Blackwell architecture"),
    _card("T4", 14.56, 65.0, 8.1, 320, 3, "NVIDIA T4"),
    _card("V100 16GB", 15.76, 125.0, 15.7, 900, 3, "NVIDIA V100"),
    _card("V100 32GB", 31.73, 125.0, 15.7, 900, 3, "NVIDIA V100"),
    _card("A10", 21.98, 125.0, 31.2, 600, 4, "NVIDIA A10"),
    _card("A10G", 21.98, 70.0, 35.0, 600, 4, "NVIDIA A10G"),
    _card("A40", 44.34, 149.7, 37.4, 696, 4, "NVIDIA A40"),
    _card("RTX A5000", 23.56, 111.1, 27.8, 768, 4, "NVIDIA RTX A5000"),
    _card("RTX A6000", 47.40, 154.8, 38.7, 768, 4, "NVIDIA RTX A6000"),
    _card("RTX 6000 Ada", 47.37, 364.2, 91.1, 960, 4, "NVIDIA RTX 6000 Ada"),
    _card("L4", 21.96, 121.0, 30.3, 300, 4, "NVIDIA L4"),
    _card("L40S", 44.39, 362.0, 91.6, 864, 4, "NVIDIA L40S"),
    _card("A100 40GB", 39.38, 312.0, 19.5, 1555, 4, "NVIDIA A100"),
    _card("A100 80GB", 79.14, 312.0, 19.5, 2039, 4, "NVIDIA A100"),
    _card("H100", 79.10, 989.4, 66.9, 3350, 5, "NVIDIA H100 SXM"),
    _card("H100 PCIe", 79.10, 756.0, 51.2, 2039, 5, "NVIDIA H100 PCIe"),
    _card("H200", 139.71, 989.4, 66.9, 4800, 5, "NVIDIA H200"),
    _card("B200", 178.35, 2250.0, 75.0, 7700, 5, "NVIDIA HGX B200"),
    _card("MI300X", 191.69, 1307.4, 163.4, 5300, 5, "AMD Instinct MI300X"),
)
#: The card whose rates are used if only a size is known, or nothing.
USUAL_CARD = "A100 80GB"
#: Cards whose cuBLAS workspace is larger.
_HOPPER = ("H100", "H200", "B200", "RTX 5090")
#: NVIDIA's cards before Ampere, on which no kernel of FlashAttention's packages runs.
_BEFORE_AMPERE = ("RTX 2080", "T4", "V100")


def setup_on(card: Card, setup: Setup) -> Setup:
    """`setup` with the cuBLAS workspace of `card`."""
    return replace(setup, workspace=CUBLAS_WORKSPACE_HOPPER) if card.name.startswith(_HOPPER) else setup


def check_attention(card: Card, attention: str | None) -> None:
    """Raises a UsageError if `attention` is of FlashAttention's packages, and `card` runs none of their kernels."""
    if attention is not None and attention.startswith("flash_attention") and card.name.startswith(_BEFORE_AMPERE):
        raise UsageError(f"{attention} runs on Ampere and newer cards, and {card.name} is older.", "Use sdpa.")


def find_card(text: str) -> Card:
    """The card that `text` names (``rtx4090``, ``a100-80gb``, a result of `torch.cuda.get_device_name`), or one of its
    size, which has a unit: ``24GiB`` is 24 x 2**30 bytes, ``24GB`` is 24 x 10**9. Raises a UsageError if no card has
    this name, several have, or the size is not positive."""
    text = str(text)  # from Python it may be a number
    size = _SIZE.fullmatch(text.strip())
    if size is not None:
        return _sized(text, size)
    wanted, cards = _key(text), {_key(card.name): card for card in CARDS}
    found = [card for key, card in cards.items() if wanted in (key, key.removeprefix("rtx"))]
    found = found or [card for card in CARDS if wanted in _beginnings(card.name)]
    found = found or [card for key, card in cards.items() if key == wanted.replace("pcie", "")]
    if not found:  # a device's name may say more: NVIDIA H100 80GB HBM3
        found = [card for key, card in cards.items() if wanted.startswith(key) and _is_size(wanted[len(key) :], card)]
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"'{text}' names several cards.", f"Say which: {', '.join(_said(card) for card in found)}.")
    if re.fullmatch(r"[\d.]+\s*g?", text.strip(), re.IGNORECASE):
        number = text.strip().lower().rstrip("g ")
        raise UsageError(f"'{text}' has no unit.", f"Write {number}GiB (x 2^30 bytes) or {number}GB (x 10^9).")
    near = [_said(cards[key]) for key in difflib.get_close_matches(wanted, cards, n=3, cutoff=0.5)]
    known = ", ".join(near or map(_said, CARDS))
    raise UsageError(
        f"No card is named '{text}'.",
        f"{'Did you mean' if near else 'Known'}: {known}; or give its memory, e.g. 24GiB.",
    )


def _sized(text: str, size: re.Match[str]) -> Card:
    unit = next(unit for unit in _SIZES if unit.lower() == size[2].lower())
    memory = round(float(size[1]) * _SIZES[unit])
    if not memory:
        raise UsageError(f"A card of '{text}' has no memory.", "Give its size, e.g. 24GiB.")
    like = find_card(USUAL_CARD)
    source = f"a size was given; rates of an {like.name}"
    return replace(like, name=f"{size[1]} {unit}", memory=memory, source=source, is_named=False)


def _is_size(rest: str, card: Card) -> bool:
    """Whether `rest` of a name is empty or the memory of `card`; a 4090 Laptop GPU and a 3080 12GB are other cards."""
    size = re.fullmatch(r"(?:(\d+)gb)?(?:pcie)?", rest)
    return size is not None and (size[1] is None or abs(int(size[1]) * GIB / card.memory - 1) < 0.12)


def _key(text: str) -> str:
    return "".join(word for word in re.split(r"[\s_\-,()]+", text.lower()) if word not in _NOISE)


def _beginnings(name: str) -> Iterator[str]:
    """Keys of the first words of a name: ``a100`` for the A100 80GB, but not ``rtx409`` for the RTX 4090."""
    words = name.split()
    for first in (0, 1) if words[0] == "RTX" else (0,):
        yield from (_key(" ".join(words[first:last])) for last in range(first + 1, len(words)))


def _said(card: Card) -> str:
    return card.name.lower().replace("rtx ", "rtx").replace(" ", "-")
