"""Runs independent work in parallel, in forks of the process. For the command line only, which owns its process."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")
#: Most processes at a time: each takes some hundred MB.
_MOST = 4
#: A constant of Linux's prctl.h.
_PR_SET_PDEATHSIG = 1
_allowed: ContextVar[bool] = ContextVar("allowed", default=False)


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Inside, `each` may fork. By default it may not, since a fork can break threads and devices of a host process."""
    token = _allowed.set(True)
    try:
        yield
    finally:
        _allowed.reset(token)


def processes() -> int:
    """The most processes that `each` uses, this one included; 1 if a fork would not be safe."""
    if not _allowed.get() or sys.platform != "linux":
        return 1
    import torch

    if torch.cuda.is_initialized():
        return 1
    return min(_MOST, len(os.sched_getaffinity(0)))


def each(work: Sequence[Callable[[], T]], begun: Callable[[int], object] = lambda number: None) -> list[T]:
    """The results of `work`, in order; they must be picklable. This process repeats work that failed or was not
    finished, so the error of the first function in order is raised, as without forks. `begun` is called with the number
    of each function that this process begins."""
    count = min(processes(), len(work))
    if count < 2:
        results = []
        for number, do in enumerate(work):
            begun(number)
            results.append(do())
        return results
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
                warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads; forks need none
                try:
                    process.start()
                except OSError:  # no process or memory is left: this process does the work
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


def _claimed(
    work: Sequence[Callable[[], T]], claims: int, begun: Callable[[int], object] = lambda number: None
) -> dict[int, T]:
    """Number -> result of each function that this process takes before another one does."""
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

    # End this process when its parent is killed.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    parent = multiprocessing.parent_process()
    if parent is None or os.getppid() != parent.pid or not _autograd_runs():
        return
    # A parent's thread may hold a lock of its streams. Its thread pool is not in the fork (as in DataLoader workers).
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    torch.set_num_threads(1)
    sender.send(_claimed(work, claims))


def _autograd_runs() -> bool:
    """Whether backward runs in this fork: not if the parent's backward has started threads, one per accelerator."""
    import torch

    try:
        torch.zeros((), requires_grad=True, device="cpu").backward()
    except RuntimeError:
        return False
    return True
