"""What an input may do to a reader: answer, or raise a `MemoptError` of one sentence; nothing else, and soon."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from memopt.errors import MemoptError

#: CPU seconds of one input. Most take a millisecond.
SECONDS = 4.0
#: Bytes that a whole run may add to the process.
GROWTH = 600 << 20
T = TypeVar("T")

_allowed: list[tuple[Path, Path]] = []
_offences: list[str] = []
_WRITES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.chmod"}


class Hung(BaseException):
    """An input took too long."""


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _allowed or event not in {"open", *_WRITES} or not isinstance(arguments[0], str | bytes | os.PathLike):
        return
    sandbox, folder = _allowed[-1]
    path = Path(os.path.abspath(os.fsdecode(arguments[0])))
    writes = event != "open" or bool((arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))
    if writes or (path.is_relative_to(sandbox) and not path.is_relative_to(folder)) or path == Path("/etc/passwd"):
        _offences.append(f"{event} {path}")


sys.addaudithook(_audit)


@contextlib.contextmanager
def guarded(folder: Path) -> Iterator[None]:
    """Inside it, nothing is written, no folder beside `folder` is read, and some seconds of CPU time pass at most.

    Raises:
        AssertionError: something was written, or read outside.
        Hung: it took too long.
    """

    def stop(*_: object) -> None:
        raise Hung(f"over {SECONDS} seconds")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    _offences.clear()
    _allowed.append((folder.parent, folder))
    try:
        yield
    finally:
        _allowed.pop()
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    assert not _offences, _offences


def answer(folder: Path, read: Callable[[], T]) -> T | None:
    """What `read` returns; None where it refuses, in one sentence that a terminal can show."""
    with guarded(folder):
        try:
            return read()
        except MemoptError as error:
            text = str(error)
    assert text.isprintable(), ascii(text)
    assert len(text) < 3_000, text[:200]
    return None


def peak() -> int:
    """Most bytes that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
