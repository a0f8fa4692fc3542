"""Triton kernels on the emulated device: run by Triton's interpreter, or checked and left out.

Which of the two is Triton's own variable: with TRITON_INTERPRET=1 results are right; without it nothing but launches,
memory and synchronisations means anything, in a hundredth of the time.
"""

from __future__ import annotations

import os
from operator import attrgetter
from typing import Any

import torch

from tests.device.emulator.counting import Meter

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def install(meter: Meter) -> None:
    """Let memopt run its kernels on tensors of the emulated device, for the life of the process."""
    import memopt.kernels.base.device as device

    device._is_there = attrgetter("is_cuda")
    if INTERPRETED:
        from triton.runtime.interpreter import InterpretedFunction

        from tests.triton import bf16, members

        bf16.install()
        members.install()
        _count(InterpretedFunction, meter, runs=True)
    else:
        from triton.runtime import JITFunction

        _count(JITFunction, meter, runs=False)


def _count(kind: Any, meter: Meter, runs: bool) -> None:
    stock = kind.__getitem__

    def launcher(kernel: Any, grid: Any) -> Any:
        run = stock(kernel, grid) if runs else None

        def launch(*arguments: Any, **options: Any) -> Any:
            meter.launched_kernel(kernel.fn.__name__)
            _check_device(kernel.fn.__name__, [*arguments, *options.values()])
            return run(*arguments, **options) if run is not None else None

        return launch

    kind.__getitem__ = launcher


def _check_device(name: str, arguments: list[Any]) -> None:
    """
    Raises:
        RuntimeError: a tensor is not on the current device, where the kernel would read another's memory.
    """
    current = torch.cuda.current_device()
    for argument in arguments:
        if isinstance(argument, torch.Tensor) and argument.get_device() != current:
            raise RuntimeError(
                f"the kernel {name} was launched on cuda:{current} with a tensor on {argument.device} (emulated)"
            )
