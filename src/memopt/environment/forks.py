"""Independent work at the same time, in forks of the process: for the command line, which owns its process."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")
#: Processes at one time: each takes some hundred MB.
_MOST = 4
#: Of Linux's prctl.h.
_PR_SET_PDEATHSIG = 1
_allowed: ContextVar[bool] = ContextVar("allowed", default=False)


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Inside, `each` may fork. A process of somebody else's may hold threads and devices that a fork breaks."""
    token = _allowed.set(True)
    try:
        yield
    finally:
        _allowed.reset(token)


def processes() -> int:
    """How many processes `each` uses at most, this one included; 1 if a fork would not be sound."""
    if not _allowed.get() or sys.platform != "linux":
        return 1
    import torch

    if torch.cuda.is_initialized():
        return 1
    return min(_MOST, len(os.sched_getaffinity(0)))


def each(work: Sequence[Callable[[], T]], begun: Callable[[int], object] = lambda number: None) -> list[T]:
    """The results of `work`, in order; they have to be picklable.

    What a fork did not finish is done here, so an error is that of the first in order, as without forks.
    `begun` is told the number of what this process begins; forks have begun those before.
    """
    count = min(processes(), len(work))
    if count < 2:
        return [_told(do, begun, number) for number, do in enumerate(work)]
    import multiprocessing

    context = multiprocessing.get_context("fork")
    claims, feed = os.pipe()
    os.write(feed, bytes(range(len(work))))
    os.close(feed)
    workers = []
    try:
        for _ in range(count - 1):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(work, claims, sender), daemon=True)
            with sender, warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: of threads, which it does not need
                try:
                    process.start()
                except OSError:  # no process or memory left for it: this one does the work
                    receiver.close()
                    break
            workers.append((process, receiver))
        done = _claimed(work, claims, begun)
        for _, receiver in workers:
            with contextlib.suppress(EOFError, OSError):
                done |= receiver.recv()
    finally:
        os.close(claims)
        for process, receiver in workers:
            process.kill()
            process.join()
            receiver.close()
    return [done[number] if number in done else do() for number, do in enumerate(work)]


def _told(do: Callable[[], T], begun: Callable[[int], object], number: int) -> T:
    begun(number)
    return do()


def _claimed(
    work: Sequence[Callable[[], T]], claims: int, begun: Callable[[int], object] = lambda number: None
) -> dict[int, T]:
    """Number -> result of those that no other process took first."""
    done: dict[int, T] = {}
    while number := os.read(claims, 1):
        begun(number[0])
        with contextlib.suppress(Exception):
            done[number[0]] = work[number[0]]()
    return done


def _work(work: Sequence[Callable[[], Any]], claims: int, sender: Any) -> None:
    import ctypes
    import multiprocessing
    import signal

    import torch

    # Nobody waits for a process whose parent was killed.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    parent = multiprocessing.parent_process()
    if parent is None or os.getppid() != parent.pid or not _autograd_runs():
        return
    # A thread of the parent may hold a lock of its streams; its pool of threads does not exist here (DataLoader too).
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    torch.set_num_threads(1)
    sender.send(_claimed(work, claims))


def _autograd_runs() -> bool:
    """Whether backward runs in this fork: not where the parent's has begun threads, one for each accelerator."""
    import torch

    try:
        torch.zeros((), requires_grad=True).backward()
    except RuntimeError:
        return False
    return True
