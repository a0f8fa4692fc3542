"""Rows of padding tokens in a linear's input, left out of its sample after gradients have shown that they get none.

An attention mask marks padding tokens, but a model may read them all the same. So a linear first draws them like other
tokens. It leaves them out after two gradients in a row were 0 at all padding tokens. It goes on checking, and if a
padding token ever gets a gradient later, draws them again for good.
"""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memopt.torch_compat import FakeTensor

#: Number of gradients in a row without one on padding, after which padding is left out.
_ENOUGH = 2
_SILENT, _QUIET, _COUNTS = 0, 1, 2


@dataclass
class _Seen:
    """Observations of one linear."""

    name: str
    quiet: int = 0
    """Number of gradients without one on padding, since the last gradient that had one."""
    counted: bool = False
    """Whether padding got a gradient after it had been left out."""


class PaddingWatch:
    """Observations of the gradients of one model's linears at padding; linears have numbers. A deepcopy or pickle lacks
    notes that were not settled yet."""

    def __init__(self) -> None:
        self._linears: list[_Seen] = []
        self._notes: list[tuple[int, Tensor, bool]] = []
        self._coming: list[tuple[list[tuple[int, Tensor, bool]], Tensor, torch.cuda.Event | None]] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._linears)

    def add(self, name: str) -> int:
        """Add a linear; returns its number."""
        self._linears.append(_Seen(name))
        return len(self._linears) - 1

    def leaves_out(self, linear: int) -> bool:
        """Whether padding is left out of the linear's samples."""
        seen = self._linears[linear]
        return seen.quiet >= _ENOUGH and not seen.counted

    def note(self, linear: int, norms: Tensor, real: Tensor, left_out: bool) -> None:
        """Note a gradient, without waiting for the device.

        Args:
            norms: (n,), the norms of the rows of the gradient of the linear's output.
            real: bool (n,), false for padding.
            left_out: whether a sample was drawn without padding.
        """
        if norms.is_meta or isinstance(norms, FakeTensor):
            return
        with self._lock:
            self._notes.append((linear, _verdict(norms, real), left_out))

    def settle(self) -> None:
        """Evaluate all notes, with one transfer from each device. Notes from a GPU are read in the next call: their
        transfer is done by then, so there is no wait for the device."""
        with self._lock:
            notes, self._notes = self._notes, []
        arrived, self._coming = self._coming, []
        for device in dict.fromkeys(verdict.device for _, verdict, _ in notes):
            there = [note for note in notes if note[1].device == device]
            verdicts = torch.stack([verdict for _, verdict, _ in there]).to("cpu", non_blocking=device.type == "cuda")
            event = torch.cuda.Event() if device.type == "cuda" else None
            if event is not None:
                event.record(torch.cuda.current_stream(device))
            (arrived if event is None else self._coming).append((there, verdicts, event))
        for there, verdicts, event in arrived:
            if event is not None:
                event.synchronize()
            for (linear, _, left_out), verdict in zip(there, verdicts.tolist(), strict=True):
                self._conclude(linear, verdict, left_out)

    def _conclude(self, linear: int, verdict: int, left_out: bool) -> None:
        seen = self._linears[linear]
        if verdict == _QUIET:
            seen.quiet += 1
        elif verdict == _COUNTS and self.leaves_out(linear):
            seen.counted = True
            if left_out:
                warnings.warn(
                    f"Padding tokens got a gradient at '{seen.name}' for the first time; the gradient of its weight "
                    "missed them until now, and from now on they are drawn like all tokens.",
                    stacklevel=2,
                )
        elif verdict == _COUNTS:
            seen.quiet = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"_linears": self._linears}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.__dict__.update(state)


def _verdict(norms: Tensor, real: Tensor) -> Tensor:
    """int8 (): whether padding got a gradient. Silent if there is no padding, if no real row has a gradient either
    (e.g. before a LoRA weight that starts at zero), or if a norm is not finite (a loss scaler skips that step)."""
    has = norms > 0
    counts, quiet = (has & ~real).any(), (has & real).any() & ~real.all()
    verdict = torch.where(counts, _COUNTS, torch.where(quiet, _QUIET, _SILENT))
    return torch.where(norms.isfinite().all(), verdict, _SILENT).to(torch.int8)
