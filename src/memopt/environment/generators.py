"""Global state of PyTorch that memopt and the user's training run share: random generators and the default device."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Restores every global generator at exit: Python's, numpy's, and torch's of the CPU and of CUDA or ROCm.

    Also a decorator, for the public functions. A model's forward may draw from any of these generators. Inside, new
    tensors are on the CPU unless a device is given, whatever ``torch.set_default_device`` says: probes draw their
    numbers from generators of the CPU.
    """
    python, numpy = random.getstate(), np.random.get_state()
    # Do not read CUDA's state before its first use: that would initialise CUDA.
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    # A device that is entered is a function mode; without need there is none.
    on_cpu = contextlib.nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
    with on_cpu, torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def seed_cpu(seed: int) -> None:
    """Seed only torch's CPU generator; ``torch.manual_seed`` seeds all devices, also devices that are not used yet."""
    torch.default_generator.manual_seed(seed)


def seed_all(seed: int) -> None:
    """Seed each generator that a forward on the CPU may draw from: torch's, Python's and numpy's."""
    seed_cpu(seed)
    random.seed(seed)
    np.random.seed(seed)
