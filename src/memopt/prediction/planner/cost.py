"""The time of operations on a card: FLOPs over its rate or bytes over its bandwidth, whichever takes longer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from memopt.reporting.operations import Operation


class Card(Protocol):
    """What a device computes and moves in a second."""

    @property
    def flops(self) -> float:
        """In 16 bits, of products, per second."""

    @property
    def flops_fp32(self) -> float: ...
    @property
    def bandwidth(self) -> float:
        """Bytes per second, of its own memory."""

    @property
    def link(self) -> float:
        """Bytes per second, to the memory of the host."""


def nanoseconds(operations: Iterable[Operation], card: Card) -> int:
    """Of operations that run one after another, and of copies to and from the host beside them: the longer of both."""
    own, copied = 0.0, 0
    for each in operations:
        rate = card.flops if each.itemsize <= 2 else card.flops_fp32
        own += max(each.flops / rate, each.nbytes / card.bandwidth)
        copied += each.copied
    return round(1e9 * max(own, copied / card.link))
