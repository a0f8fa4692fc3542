"""Finds rows of an output that jump under random rounding: a choice in them (a router's) depends on one rounding."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

#: Scale of the rounding in runs that find jumping rows, as a multiple of a fold's; most rows that may jump, as a share.
JUMP_SCALE, _MOST = 4.0, 0.1
_Run = list[dict[str, Tensor]]
_Rows = list[Tensor]


class JumpingRows:
    """Collects jumping rows over runs of the original with random rounding.

    Args:
        truth: outputs of a more precise run, batch by batch.
        usual: field -> RMS error of the original, for the fields that have rows.
        judged: runs that are compared with the original's error; a jump in these alone does not make a row count.
    """

    def __init__(self, truth: _Run, usual: Mapping[str, float], judged: Iterable[_Run]) -> None:
        self._truth, self._usual, runs = truth, usual, list(judged)
        self._judged = {
            field: functools.reduce(_either, (self._of(run, field) for run in runs))
            for field in usual
            if all(self._fits(run, field) for run in runs)
        }
        self._found = {field: [torch.zeros(batch[field].shape[:-1]).bool() for batch in truth] for field in usual}

    def _fits(self, run: _Run, field: str) -> bool:
        return all(field in batch and batch[field].shape == exact[field].shape for batch, exact in self._pairs(run))

    def _of(self, run: _Run, field: str) -> _Rows:
        limit = max(JUMP_SCALE**2 * self._usual[field], torch.finfo(torch.float64).tiny)
        errors = (batch[field].double() - exact[field].double() for batch, exact in self._pairs(run))
        return [error.square().mean(-1).sqrt() > limit for error in errors]

    def _pairs(self, run: _Run) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
        return zip(run, self._truth, strict=True)

    def add(self, run: _Run) -> None:
        """Add the rows that jump in this run of the original."""
        for field in list(self._found):
            if self._fits(run, field):
                self._found[field] = _either(self._found[field], self._of(run, field))
            else:
                del self._found[field]

    def may_jump_in_more(self, runs: Sequence[_Run]) -> bool:
        """Whether few rows jump in a judged run, and some of them in none of `runs`, which are of the original.

        Results that read such a row have a smaller error too; a run of the original with the same jump shows its size.
        """
        for field, judged in self._judged.items():
            if field in self._found and _are_few(judged):
                seen = functools.reduce(_either, (self._of(run, field) for run in runs))
                if any(bool((a & ~b).any()) for a, b in zip(judged, seen, strict=True)):
                    return True
        return False

    def rows(self) -> dict[str, _Rows]:
        """Field -> rows of each batch. If more than a tenth of the rows jump, the error itself is large: such a field
        is left out."""
        return {field: rows for field, rows in self._found.items() if _are_few(rows)}


def _either(a: _Rows, b: _Rows) -> _Rows:
    return list(map(operator.or_, a, b))


def _are_few(rows: _Rows) -> bool:
    return sum(int(each.sum()) for each in rows) <= _MOST * sum(each.numel() for each in rows)
