"""Processes that train together, forked from one that has imported what all of them need."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed
import torch.multiprocessing

from tests.support.processes import preload


def run_ranks(train: Callable[..., None], *arguments: Any, ranks: int = 2) -> None:
    """Call ``train(rank, *arguments)`` in `ranks` processes and wait for them.

    `train` is a function of a module; it starts the process group itself.

    Raises:
        ProcessRaisedException: it raised in some process.
    """
    preload()
    torch.multiprocessing.start_processes(_rank, (train, *arguments), nprocs=ranks, start_method="forkserver")


def _rank(rank: int, train: Callable[..., None], *arguments: Any) -> None:
    """The rank's process, which ends without taking its process groups apart.

    Gloo's destructor holds the GIL while it joins a thread that may be waiting for the GIL: about one run in six of DDP
    would hang for ever.
    """
    kept, stock = [], torch.distributed.destroy_process_group

    def destroy(group: Any = None) -> None:
        kept.append(group or torch.distributed.group.WORLD)
        stock(group)

    torch.distributed.destroy_process_group = destroy
    train(rank, *arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
