"""The norm of each token's gradient at a sample's last visit, one number for each linear, on the host.

A batch with an index of its samples is one :class:`Step`. It reads the norms remembered for these samples, and records
new norms in backward. Only the start of the next batch waits for the device.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from memopt.errors import InputsError

#: The least remembered norm, relative to the mean of the known norms: an outdated 0 must not exclude a row.
_FLOOR = 0.05
#: Stored for a gradient of 0, since 0 means that nothing is known. A normal number in bf16 and fp32.
_LEAST = 1e-30


class GradientMemory:
    """|dY| of each token at its sample's last visit, for each sampled linear of a model.

    The table is bf16 (samples, max_tokens, linears) on the host: 2 * samples * max_tokens * linears bytes in each
    process. A token's place is its number among the real tokens of its sequence, whatever the padding; tokens beyond
    `max_tokens` are not remembered. The host allocates pages when samples are visited for the first time.
    """

    def __init__(self, samples: int, max_tokens: int, linears: int) -> None:
        """
        Raises:
            InputsError: there are no samples, or no tokens to remember.
        """
        if samples < 1 or max_tokens < 1:
            raise InputsError(
                f"A memory of gradients is for at least one sample and one token, not {samples} and {max_tokens}."
            )
        self.samples, self.max_tokens, self.linears = samples, max_tokens, linears
        self._table: Tensor | None = torch.zeros(samples, max_tokens, linears, dtype=torch.bfloat16, device="cpu")
        self._recorded: list[Step] = []
        self._lock = threading.Lock()
        self.calls = self.indexed = self.written = 0
        """Numbers of the model's training forwards, of its forwards with an index, and of writes to the table."""

    @property
    def nbytes(self) -> int:
        """Bytes of the table; 0 after `forget`."""
        return 0 if self._table is None else self._table.nbytes

    @property
    def is_kept(self) -> bool:
        """Whether the table exists: false after `forget`."""
        return self._table is not None

    def __str__(self) -> str:
        return (
            f"The memory of gradients takes {self.nbytes / 1e6:,.1f} MB of the host in each process: 2 bytes for each "
            f"of {self.samples:,} samples x {self.max_tokens:,} tokens x {self.linears:,} sampled linears."
        )

    def begin(self, index: Tensor) -> Step | None:
        """A step over the samples `index`, int (batch,) on any device; None for an empty index or after `forget`.

        Raises:
            InputsError: an index is outside of the table.
        """
        rows = index.detach().flatten().cpu().long()
        if self._table is None or not len(rows):
            return None
        if bool((rows < 0).any()) or bool((rows >= self.samples).any()):
            raise InputsError(
                f"A batch holds sample {int(rows.max() if rows.min() >= 0 else rows.min())}, but gradients are "
                f"remembered for samples 0 to {self.samples - 1}.",
                "Create the memory with the data set of the training.",
            )
        self.indexed += 1
        return Step(self, rows, self._table[rows])

    def enqueue(self, step: Step) -> None:
        """Let the next `flush` write the norms of `step`."""
        with self._lock:
            self._recorded.append(step)

    def flush(self) -> None:
        """Write the norms recorded since the last flush; called at the start of each training forward."""
        with self._lock:
            recorded, self._recorded = self._recorded, []
        for step in recorded:
            for linears, norms in step.take():
                self._write(step.rows, linears, norms)

    def forget(self) -> None:
        """Free the table; the linears go on without it."""
        self._table, self._recorded = None, []

    def _write(self, rows: Tensor, linears: Sequence[int], norms: Tensor) -> None:
        """`norms`: fp32 (batch, max_tokens, linears), 0 if nothing is known."""
        if self._table is None:
            return
        self.written += 1
        where = (rows[:, None], slice(None), torch.tensor(linears, device="cpu")[None])
        new, old = norms.bfloat16().transpose(1, 2), self._table[where[0], :, where[2]]
        # A loss scaler skips steps with gradients that are not finite: keep the old norms.
        self._table[where[0], :, where[2]] = torch.where((new > 0) & new.isfinite(), new, old)


class Step:
    """Remembered norms of the samples of one batch, and the norms recorded in this step."""

    def __init__(self, memory: GradientMemory, rows: Tensor, known: Tensor) -> None:
        """
        Args:
            rows: int64 (batch,) on the host.
            known: bf16 (batch, max_tokens, linears) on the host, 0 if nothing is known.
        """
        self.rows = rows
        self._memory, self._lock = memory, threading.Lock()
        self._is_known = (known > 0).flatten(0, 1).any(0).tolist()
        self._known = known if any(self._is_known) else None
        self._there: dict[torch.device, Tensor] = {}
        self._recorded: dict[torch.device, tuple[Tensor, set[int]]] = {}

    def places(self, batch: int, length: int, real: Tensor | None, device: torch.device) -> Tensor:
        """int64 (batch, length) on `device`: each token's place in the table, `max_tokens` for one that has none.

        Args:
            real: bool (batch * length,), false for padding; None without padding.
        """
        end = self._memory.max_tokens
        if real is None:
            return torch.arange(length, device=device).clamp(max=end).expand(batch, -1)
        real = real.view(batch, length)
        return torch.where(real, (real.cumsum(1) - 1).clamp(max=end), end)

    def recall(self, linear: int, places: Tensor) -> Tensor | None:
        """Norms of a linear's gradient at the last visit, fp32 (batch * length,): at least a twentieth of the mean of
        the known norms; that mean for a token without a norm. None if no token of the batch's samples has one."""
        if self._known is None or not self._is_known[linear]:
            return None
        table = self._there.get(places.device)
        if table is None:
            # One more row, of zeros, for tokens without a place.
            bordered = torch.nn.functional.pad(self._known, (0, 0, 0, 1))
            table = self._there[places.device] = bordered.to(places.device, non_blocking=True)
        norms = table[:, :, linear].float().gather(1, places).flatten()
        known = norms > 0
        largest = norms.amax()
        mean = largest * ((norms / largest).sum() / known.sum())  # the sum itself may be beyond fp32
        values = torch.where(known, norms, mean).maximum(_FLOOR * mean)
        # The samples may have norms, but none for the tokens of this batch.
        return torch.where(known.any(), values, 1.0)

    def record(self, linear: int, places: Tensor, norms: Tensor) -> None:
        """Add norms (batch * length,) of a linear's gradient; norms of several calls add up as sqrt(a^2 + b^2)."""
        device, end = norms.device, self._memory.max_tokens
        with self._lock:
            if not self._recorded:
                self._memory.enqueue(self)
            if device not in self._recorded:
                shape = (self._memory.linears, len(self.rows), end + 1)
                self._recorded[device] = torch.zeros(shape, dtype=torch.float32, device=device), set()
            recorded, linears = self._recorded[device]
            linears.add(linear)
            new = norms.float().view(places.shape).clamp(min=_LEAST)
            recorded[linear].scatter_(1, places, torch.hypot(recorded[linear].gather(1, places), new))

    def take(self) -> list[tuple[list[int], Tensor]]:
        """Return and clear the records: numbers of linears, and norms (batch, max_tokens, linears) on the host."""
        with self._lock:
            recorded, self._recorded = self._recorded, {}
        taken = []
        for norms, linears in recorded.values():
            chosen = sorted(linears)
            taken.append((chosen, norms.cpu()[chosen, :, :-1].permute(1, 2, 0)))
        return taken
