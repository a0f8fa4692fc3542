"""The setup of a predicted training step: optimizer, devices, allocator. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Optimizer = Literal["adamw", "adamw8bit", "sgd", "adafactor"]
Sharding = Literal["none", "ddp", "zero1", "zero2", "zero3", "fsdp"]

MIB = 1 << 20
#: Bytes of the workspace that PyTorch gives a cuBLAS handle: ``:4096:2:16:8`` KiB, and 32 MiB from Hopper on
#: (aten/src/ATen/cuda/CublasHandlePool.cpp).
CUBLAS_WORKSPACE = 2 * 4096 * 1024 + 8 * 16 * 1024
CUBLAS_WORKSPACE_HOPPER = 32 * MIB
#: Bytes that a process takes of a device before it allocates anything, with lazily loaded kernels (CUDA 12).
CUDA_CONTEXT = 512 * MIB


@dataclass(frozen=True)
class Setup:
    """How a model is trained, beside `memopt.trace.training.Training`."""

    optimizer: Optimizer = "adamw"
    """``adamw``, ``sgd``: those of PyTorch; ``adamw8bit``: bitsandbytes; ``adafactor``: transformers."""
    fused: bool = False
    """PyTorch's fused kernel; its default is foreach, which needs memory for intermediate results."""
    momentum: float = 0.0
    """Of ``sgd``."""
    accumulation: int = 1
    """Micro-batches in a step. With more than one, gradients live in forward too."""
    sharding: Sharding = "none"
    devices: int = 1
    expandable_segments: bool = False
    """``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``."""
    workspace: int = CUBLAS_WORKSPACE
    """Bytes of one cuBLAS workspace; the forward's thread has one, and the backward's has another."""
    context: int = CUDA_CONTEXT
    """Bytes of the CUDA context."""
    memory: int | None = None
    """Bytes of the device, where PyTorch gives unused segments back before it is out of memory; None: it has room."""

    def __post_init__(self) -> None:
        """Check the numbers, and that there is a formula.

        Raises:
            ValueError: `devices` or `accumulation` is below 1, one device is to share, or ZeRO is to step another
                optimizer than PyTorch's.
        """
        if self.devices < 1 or self.accumulation < 1:
            raise ValueError(f"Devices ({self.devices}) and micro-batches ({self.accumulation}) have to be 1 or more.")
        if self.sharding != "none" and self.devices == 1:
            raise ValueError(f"Sharding '{self.sharding}' needs more than one device.")
        if self.sharding.startswith("zero") and self.optimizer not in ("adamw", "sgd"):
            # It steps flat fp32 parts, which have no rows, columns or small tensors.
            raise ValueError(
                f"Sharding '{self.sharding}' is predicted only for adamw and sgd, not for {self.optimizer}."
            )

    def __str__(self) -> str:
        words = [self.optimizer + (" (fused)" if self.fused else "")]
        if self.accumulation > 1:
            words.append(f"{self.accumulation} micro-batches")
        if self.sharding != "none":
            words.append(f"{self.sharding} over {self.devices} devices")
        return ", ".join(words)
