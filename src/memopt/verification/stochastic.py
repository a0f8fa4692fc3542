"""Stochastic arithmetic: rounding at random shows how large the rounding error of a result can be (CESTAC: Vignes,
1993), and which rows of an output jump: a choice in them (a router's) depends on one rounding."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memopt.torch_compat import TorchDispatchMode, operator_schema, tree_map

#: Scale of the rounding in runs that find jumping rows, as a multiple of a fold's; most rows that may jump, as a share.
JUMP_SCALE, _MOST = 4.0, 0.1
Run = list[dict[str, Tensor]]
"""Outputs of one run: field -> tensor, batch by batch."""
_Rows = list[Tensor]


class RandomRounding(TorchDispatchMode):
    """Inside, each result in `dtype` is changed by up to `scale` / 2 units in the last place and then rounded; by a
    generator of its own, so that a forward draws as it does outside. Views, and results that are or would become
    infinite, are not changed."""

    def __init__(self, dtype: torch.dtype, scale: float = 1.0, seed: int = 0) -> None:
        super().__init__()
        self._dtype, self._scale, self._generator = dtype, scale, torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(each.alias_info is not None for each in operator_schema(func).returns):
            return result
        return tree_map(self._rounded, result)

    def _rounded(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dtype != self._dtype or leaf.is_meta:
            return leaf
        return rounded_at_random(leaf, self._generator, self._scale)


def rounded_at_random(tensor: Tensor, generator: torch.Generator, scale: float = 1.0) -> Tensor:
    """`tensor`, with each element changed by up to `scale` / 2 units in the last place and then rounded."""
    drawn = torch.rand(tensor.shape, dtype=torch.float64, generator=generator)
    off = torch.finfo(tensor.dtype).eps * scale * (drawn - 0.5)
    rounded = (tensor.double() * (1 + off)).to(tensor.dtype)
    return torch.where(rounded.isfinite(), rounded, tensor)


class JumpingRows:
    """Collects jumping rows over runs of the original with random rounding. `truth`: outputs of a more precise run,
    batch by batch. `usual`: field -> RMS error of the original, for the fields that have rows. `judged`: runs that are
    compared with the original's error; a jump in these alone does not make a row count."""

    def __init__(self, truth: Run, usual: Mapping[str, float], judged: Iterable[Run]) -> None:
        self._truth, self._usual, runs = truth, usual, list(judged)
        self._judged = {
            field: functools.reduce(_either, (self._of(run, field) for run in runs))
            for field in usual
            if all(self._fits(run, field) for run in runs)
        }
        self._found = {field: [torch.zeros(batch[field].shape[:-1]).bool() for batch in truth] for field in usual}

    def _fits(self, run: Run, field: str) -> bool:
        return all(field in batch and batch[field].shape == exact[field].shape for batch, exact in self._pairs(run))

    def _of(self, run: Run, field: str) -> _Rows:
        limit = max(JUMP_SCALE**2 * self._usual[field], torch.finfo(torch.float64).tiny)
        errors = (batch[field].double() - exact[field].double() for batch, exact in self._pairs(run))
        return [error.square().mean(-1).sqrt() > limit for error in errors]

    def _pairs(self, run: Run) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
        return zip(run, self._truth, strict=True)

    def add(self, run: Run) -> None:
        """Add the rows that jump in this run of the original."""
        for field in list(self._found):
            if self._fits(run, field):
                self._found[field] = _either(self._found[field], self._of(run, field))
            else:
                del self._found[field]

    def may_jump_in_more(self, runs: Sequence[Run]) -> bool:
        """Whether few rows jump in a judged run, and some of them in none of `runs`, which are of the original. Results
        that read such a row have a smaller error too; a run of the original with the same jump shows its size."""
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
