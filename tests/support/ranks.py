"""Processes that train together, forked from one that has imported what all of them need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.multiprocessing

from tests.support.processes import preload


def run_ranks(train: Callable[..., None], *arguments: Any, ranks: int = 2) -> None:
    """Call ``train(rank, *arguments)`` in `ranks` processes and wait for them.

    `train` is a function of a module; it starts the process group itself.

    Raises:
        ProcessRaisedException: it raised in some process.
    """
    preload()
    torch.multiprocessing.start_processes(train, arguments, nprocs=ranks, start_method="forkserver")
