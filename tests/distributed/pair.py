"""Two processes that stay: the imports and the process group of all distributed tests are paid for once."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

#: Imported once, in the process that the ranks are forked from. Nothing here starts a thread, which a fork would lose.
_IMPORTED = ("tests.distributed.engines",)
RANKS = 2
#: A rank that waits for one that raised gives up by itself.
_PATIENCE = timedelta(seconds=60)


class Pair:
    """Two ranks of one gloo group, which call what they are sent; started at the first call."""

    def __init__(self) -> None:
        self._ranks: list[tuple[Any, Connection]] = []

    def call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        """What ``function(rank, *arguments, **options)``, of a module, returns in each rank.

        Raises:
            AssertionError: it raised in some rank; the next call gets new processes.
        """
        if not self._ranks:
            self._start()
        for _, pipe in self._ranks:
            pipe.send((function, arguments, options))
        answers = [_answer(pipe) for _, pipe in self._ranks]
        failed = {rank: text for rank, (right, text) in enumerate(answers) if not right}
        if failed:
            self.close(kill=True)
            raise AssertionError("".join(f"\n--- rank {rank} ---\n{text}" for rank, text in failed.items()))
        return [value for _, value in answers]

    def close(self, *, kill: bool = False) -> None:
        """End the processes."""
        for process, pipe in self._ranks:
            if kill:
                process.kill()
            pipe.close()  # a rank without a caller ends
            process.join()
        self._ranks = []

    def _start(self) -> None:
        multiprocessing.set_forkserver_preload([*_IMPORTED])
        context = multiprocessing.get_context("forkserver")
        folder = tempfile.mkdtemp()
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, folder, theirs), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))


def _answer(pipe: Connection) -> tuple[bool, Any]:
    try:
        answer: tuple[bool, Any] = pipe.recv()
    except EOFError:
        return False, "the process ended"
    return answer


def _serve(rank: int, folder: str, pipe: Connection) -> None:
    """What engines read of a launcher's environment is set, for those that ask for it."""
    import torch

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS), LOCAL_SIZE=str(RANKS)
    )
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS, timeout=_PATIENCE
    )
    while True:
        try:
            function, arguments, options = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(rank, *arguments, **options)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
