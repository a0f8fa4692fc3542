"""The setup of a predicted training step: optimizer, devices, allocator. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from memopt.errors import UsageError, check_choice

Optimizer = Literal[
    "adamw-fused", "adamw-foreach", "adamw8bit", "adamw-paged", "adamw8bit-paged", "adamw-offload",
    "adamw8bit-torchao", "adamw4bit-torchao", "flash-adamw", "muon", "sgd", "adafactor",
]  # fmt: skip
Sharding = Literal["none", "ddp", "zero1", "zero2", "zero3", "fsdp"]

GIB, MIB = 1 << 30, 1 << 20
#: Bytes of the workspace that PyTorch gives a cuBLAS handle: ``:4096:2:16:8`` KiB, and 32 MiB from Hopper on
#: (aten/src/ATen/cuda/CublasHandlePool.cpp).
CUBLAS_WORKSPACE = 2 * 4096 * 1024 + 8 * 16 * 1024
CUBLAS_WORKSPACE_HOPPER = 32 * MIB
#: Bytes that a process takes of a device before it allocates anything, with lazily loaded kernels (CUDA 12).
CUDA_CONTEXT = 512 * MIB
#: Description of each optimizer: its implementation, the bytes of its states, and the allocations of its step.
OPTIMIZERS: dict[Optimizer, str] = {
    "adamw-fused": "torch.optim.AdamW(fused=True), Trainer's default; two states in the weights' dtype, no copies",
    "adamw-foreach": "torch.optim.AdamW, foreach; two states in the dtype of the weights, a copy of all in its step",
    "adamw8bit": "bitsandbytes' AdamW8bit; 2.03 bytes an element (blocks of 256), 8 of embeddings, as Trainer makes it",
    "adamw-paged": "bitsandbytes' PagedAdamW32bit; 8 bytes an element in pages that leave a full device, not counted",
    "adamw8bit-paged": "bitsandbytes' PagedAdamW8bit; 2 bytes an element in pages that leave a full device, not "
    "counted, and 0.03 bytes that stay",
    "adamw-offload": "torchao's CPUOffloadOptimizer; states, a copy of weights and of gradients in the host's memory",
    "adamw8bit-torchao": "torchao's AdamW8bit; 2.03 bytes an element (blocks of 256), in its step two fp32 copies of "
    "one tensor (by the compiler's code for a CPU)",
    "adamw4bit-torchao": "torchao's AdamW4bit; 1.03 bytes an element (blocks of 256), in its step 26 bytes an element "
    "of one tensor (by the compiler's code for a CPU)",
    "flash-adamw": "flashoptim's FlashAdamW; 2.13 bytes an element (groups of 32), and 1 for 16-bit weights",
    "muon": "torch.optim.Muon for the matrices of the blocks (one state), fused AdamW for the rest",
    "sgd": "torch.optim.SGD, foreach",
    "adafactor": "transformers' Adafactor as Trainer makes it, no first moment",
}
#: The value of Trainer's `optim` for each optimizer that Trainer has.
TRAINER_NAMES: dict[Optimizer, str] = {
    "adamw-fused": "adamw_torch_fused", "adamw-foreach": "adamw_torch", "adamw8bit": "adamw_bnb_8bit",
    "adamw-paged": "paged_adamw_32bit", "adamw8bit-paged": "paged_adamw_8bit", "adamw8bit-torchao": "adamw_torch_8bit",
    "adamw4bit-torchao": "adamw_torch_4bit", "sgd": "sgd", "adafactor": "adafactor",
}  # fmt: skip
_DIVIDED_BY_ZERO = ("adamw-fused", "adamw-foreach", "sgd")
_ON_WHOLE_TENSORS = ("muon", "adamw-offload")


@dataclass(frozen=True)
class Setup:
    """The settings of training that `memopt.trace.training.Training` does not have: optimizer, devices, allocator."""

    optimizer: Optimizer = "adamw-fused"
    """One of `OPTIMIZERS`, which describes each."""
    by_trainer: bool = True
    """Whether Trainer makes the optimizer: it gives embeddings fp32 states in bitsandbytes' 8-bit optimizers."""
    accumulation: int = 1
    """Micro-batches in a step. With more than one, gradients also live during forward."""
    release_gradients: bool = False
    """Whether `memopt.release_gradients` steps each parameter in backward, and frees its gradient."""
    sharding: Sharding = "none"
    devices: int = 1
    expandable_segments: bool = False
    """``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``."""
    workspace: int = CUBLAS_WORKSPACE
    """Bytes of one cuBLAS workspace; the forward's thread has one, and the backward's has another."""
    context: int = CUDA_CONTEXT
    """Bytes of the CUDA context."""
    memory: int | None = None
    """Bytes of the device: PyTorch releases unused segments before it runs out of memory; None: enough for all."""

    def __post_init__(self) -> None:
        """Check the numbers, and that this combination of settings can be predicted. Raises a UsageError if `optimizer`
        or `sharding` is unknown, `devices` or `accumulation` is below 1, `sharding` is set for one device or missing
        for several, or the optimizer is not predicted with this sharding or with released gradients."""
        check_choice("optimizer", self.optimizer, get_args(Optimizer))
        check_choice("sharding", self.sharding, get_args(Sharding))
        if any(type(each) is not int or each < 1 for each in (self.devices, self.accumulation)):
            raise UsageError(
                f"Devices ({self.devices!r}) and micro-batches ({self.accumulation!r}) have to be whole and positive."
            )
        if self.sharding != "none" and self.devices == 1:
            raise UsageError(f"Sharding '{self.sharding}' needs more than one device.", "Add devices, e.g. 8.")
        if self.sharding == "none" and self.devices > 1:
            raise UsageError(f"With {self.devices} devices sharding has to say what they share.", "Add it, e.g. fsdp.")
        if self.release_gradients and not self.can_release:
            others = " or ".join(_ON_WHOLE_TENSORS)
            raise UsageError(f"Gradients are released on one device, without accumulation, and not by {others}.")
        hint = "Change sharding or optimizer."
        if self.sharding.startswith("zero") and self.optimizer not in _DIVIDED_BY_ZERO:
            # ZeRO steps flat fp32 parts, which have no rows, columns or small tensors.
            known = ", ".join(_DIVIDED_BY_ZERO)
            raise UsageError(f"Sharding '{self.sharding}' is predicted for {known}, not for {self.optimizer}.", hint)
        if self.sharding == "fsdp" and self.optimizer in _ON_WHOLE_TENSORS:
            raise UsageError(f"Optimizer '{self.optimizer}' is predicted for whole tensors, which FSDP divides.", hint)

    @property
    def can_release(self) -> bool:
        """Whether the optimizer could step one parameter at a time during backward."""
        return self.devices == self.accumulation == 1 and self.optimizer not in _ON_WHOLE_TENSORS

    def check_precision(self, precision: str) -> None:
        """Raise a UsageError if gradients are released under fp16, whose loss scaler reads all of them, or ZeRO, which
        keeps fp32 weights beside 16-bit ones, is to run these under autocast."""
        if precision == "bf16-autocast" and self.sharding.startswith("zero"):
            raise UsageError("ZeRO is predicted with weights in 16 bits or under autocast, not both.", "Use bf16.")
        if self.release_gradients and precision.startswith("fp16"):
            hint = "Use --precision bf16, or leave out --release-gradients."
            raise UsageError("Gradients cannot be released with fp16: its loss scaler reads all of them.", hint)

    def may_release(self, precision: str) -> bool:
        """Whether gradients could be released, but are not; never with fp16, whose loss scaler reads all gradients."""
        return self.can_release and not (self.release_gradients or precision.startswith("fp16"))

    def __str__(self) -> str:
        words: list[str] = [self.optimizer]
        if self.accumulation > 1:
            words.append(f"{self.accumulation} micro-batches")
        if self.release_gradients:
            words.append("gradients released")
        if self.sharding != "none":
            words.append(f"{self.sharding} over {self.devices} devices")
        return ", ".join(words)


@dataclass(frozen=True)
class Run:
    """How a trainer runs the steps of a model that it is given."""

    setup: Setup = field(default_factory=Setup)
    autocast: Literal["bf16", "fp16"] | None = None
    """The dtype of autocast, which counts where the weights are in fp32."""
    checkpointing: bool = False
    """Whether it will turn activation checkpointing of the model on."""
