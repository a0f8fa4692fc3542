"""What a step costs on the emulated device: launches, synchronisations with the line that caused them, bytes."""

from __future__ import annotations

import ctypes
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

#: Operators of the fallback that start no kernel.
_NO_LAUNCH = {"aten::_fused_sdp_choice", "aten::_local_scalar_dense", "aten::lift_fresh", "aten::is_set_to"}
#: Of which no line is shown: they stand between a line of a model and the operator.
_HIDDEN = ("/tests/device/emulator/", "/torch/", "<frozen ")
#: Reads and writes memory of the device from Python, which a compiled kernel does not.
_INTERPRETER = "triton/runtime/interpreter.py"
#: Lines of the call stack that an entry of `Count.waits` shows.
_LINES = 3


@dataclass
class Count:
    """What happened inside a :func:`counting`."""

    launches: Counter[str] = field(default_factory=Counter)
    """Operator ("aten::mm") or Triton kernel ("triton::_norm_forward") -> how often it was launched."""
    waits: Counter[str] = field(default_factory=Counter)
    """What waited for the device, and the lines of Python that made it, the innermost first -> how often."""
    peak: int = 0
    """Bytes allocated at the peak, above those that were allocated when the counting began."""


class Meter:
    """Receives what the emulated device reports.

    Args:
        library: the emulated device.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._count: Count | None = None
        self._sync_debug_mode = 0
        self._on_wait = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)(self._waited)
        self._on_launch = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(self._launched)

    @contextmanager
    def counting(self) -> Iterator[Count]:
        """Counts what happens inside; not to be nested."""
        assert self._count is None, "countings cannot be nested"
        count = self._count = Count()
        before = self._library.emulated_live_bytes()
        self._library.emulated_reset_peak()
        self._listen()
        try:
            yield count
        finally:
            count.peak = self._library.emulated_peak_bytes() - before
            self._count = None
            self._listen()

    @property
    def sync_debug_mode(self) -> int:
        """As `torch.cuda.get_sync_debug_mode` gives it: 0 nothing, 1 warn, 2 raise where an operator waits."""
        return self._sync_debug_mode

    @sync_debug_mode.setter
    def sync_debug_mode(self, mode: int) -> None:
        self._sync_debug_mode = mode
        self._listen()

    def launched_kernel(self, name: str) -> None:
        """A Triton kernel was launched."""
        if self._count is not None:
            self._count.launches[f"triton::{name}"] += 1

    def _listen(self) -> None:
        counts = self._count is not None
        self._library.emulated_on_launch(self._on_launch if counts else None)
        self._library.emulated_on_wait(self._on_wait if counts or self._sync_debug_mode else None)

    def _launched(self, name: bytes) -> None:
        operator = name.decode()
        if self._count is not None and operator not in _NO_LAUNCH and not _in_interpreter():
            self._count.launches[operator] += 1

    def _waited(self, what: bytes) -> int:
        if _in_interpreter():
            return 0
        if self._count is not None:
            self._count.waits[f"{what.decode()} at {_place()}"] += 1
        if self._sync_debug_mode == 1:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
        return int(self._sync_debug_mode == 2)


def _files() -> Iterator[tuple[str, int, str]]:
    frame = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back  # type: ignore[assignment]


def _in_interpreter() -> bool:
    return any(name.endswith(_INTERPRETER) for name, _, _ in _files())


def _place() -> str:
    shown = []
    for name, line, function in _files():
        if not any(part in name for part in _HIDDEN):
            shown.append(f"{'/'.join(Path(name).parts[-3:])}:{line} {function}")
        if len(shown) == _LINES:
            break
    return " < ".join(shown) or "an operator of backward"
