"""Global random generators: what memopt draws must not change what a training run draws afterwards."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """On leaving, every global generator is as it was: Python's, numpy's, and torch's of the CPU and of CUDA or ROCm.

    Also a decorator, for the public functions. A forward may draw from any of them.
    """
    python, numpy = random.getstate(), np.random.get_state()
    # Where CUDA was not used yet nothing is read: that would start it.
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def seed_cpu(seed: int) -> None:
    """Seed torch's CPU generator alone; ``torch.manual_seed`` seeds every device's, also of those not used yet."""
    torch.default_generator.manual_seed(seed)
