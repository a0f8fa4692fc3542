"""The peak of a whole training step, from a trace, an optimizer, sharding and the allocator.

Also the tensors at the peak that another setting avoids: masks of dropouts, and tokens x tokens of eager attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from memopt.prediction.allocator import least_limit, reserved
from memopt.prediction.headline import gib
from memopt.prediction.optimizers import EIGHT_BITS, follow
from memopt.prediction.setup import OPTIMIZERS, Setup
from memopt.prediction.sharding import shard, step_of_device
from memopt.saved.host import host_bytes
from memopt.trace.events import Event, Peak, Storage, Trace, peak_of
from memopt.trace.trace import trace
from memopt.trace.training import Step, Training
from memopt.walk.models.alike import places
from memopt.walk.models.attention import FLASH, FUSED
from memopt.walk.models.config import model_class

#: The margin of a prediction on a CUDA device, as a share of the reserved bytes.
MARGIN = 0.03
#: Share of the peak above which a kind of tensors gets a remedy of its own.
MATTERS = 0.02


@dataclass(frozen=True)
class Prediction:
    """The prediction for the second step of a run, when the optimizer has its states; bytes of one device."""

    training: Training
    setup: Setup
    resident: tuple[Storage, ...]
    """The storages that live throughout the step."""
    events: tuple[Event, ...]
    """All allocations and frees of the step, in order; everything that the step allocates is freed."""
    peak: Peak
    assumptions: tuple[str, ...]
    trace: Trace = field(repr=False)

    @cached_property
    def reserved(self) -> int:
        """Bytes that the CUDA caching allocator holds on a device of ``setup.memory`` with the margin kept free; the
        peak on the CPU. If the device is too small without a lower limit, the bytes under the lowest limit that is
        enough."""
        limit = self._limit
        if limit is None or self.usual <= limit:
            return self.usual
        return least_limit(self.resident, self.events, expandable=self.setup.expandable_segments)

    @cached_property
    def usual(self) -> int:
        """`reserved` without a lower limit than that of the device."""
        if not self.training.cuda_kernels:
            return self.peak.nbytes
        return reserved(self.resident, self.events, expandable=self.setup.expandable_segments, limit=self._limit)

    @property
    def _limit(self) -> int | None:
        memory = self.setup.memory
        if memory is None or not self.training.cuda_kernels:
            return None
        return max(0, int((memory - self.context) / (1 + MARGIN)))

    @property
    def limit_advice(self) -> str:
        """How to lower the allocator's limit, in words, if the step fits only so; else empty."""
        limit = self._limit
        if limit is None or not self.reserved <= limit < self.usual:
            return ""
        expandable = replace(self, setup=replace(self.setup, expandable_segments=True))
        instead = " or PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" if expandable.usual <= limit else ""
        # PyTorch rounds a fraction of the memory down, so one byte more is asked for.
        return (
            f"partly used segments would take {gib(self.usual)}; it fits with "
            f"torch.cuda.set_per_process_memory_fraction({self.reserved + 1} / torch.cuda.mem_get_info()[1]){instead}"
        )

    @property
    def context(self) -> int:
        """Bytes of the CUDA context."""
        return self.setup.context if self.training.cuda_kernels else 0

    @property
    def total(self) -> int:
        """Bytes that the process takes of the device."""
        return self.reserved + self.context

    @property
    def margin(self) -> int:
        """The margin of `total` in bytes."""
        return round(MARGIN * self.reserved)

    @property
    def offloaded(self) -> int:
        """Bytes that offloaded tensors take of CPU memory; copies back are not traced."""
        if not self.training.cuda_kernels:
            return sum(each.copied for each in self.trace.operations)
        return sum(host_bytes(each.copied) for each in self.trace.operations if each.copied)

    @property
    def needs(self) -> int:
        """Bytes that the device has to have: the total and its margin."""
        return self.total + self.margin

    def fits(self, memory: int) -> bool:
        """Whether `needs` is at most `memory`; found without the allocator if the live bytes alone are more."""
        return self.peak.nbytes + self.context <= memory and self.needs <= memory


def predict(of: Step, setup: Setup | None = None) -> Prediction:
    """Predict the peak of a training step, stock or patched. Raises a ModelError if the model cannot be built or traced
    from its config, or peft is missing for LoRA."""
    setup = setup or Setup()
    return combine(trace(step_of_device(of, setup)), setup)


def combine(traced: Trace, setup: Setup) -> Prediction:
    """The prediction for a step that has been traced; one trace serves any `setup`."""
    cuda = traced.training.cuda_kernels
    share = shard(traced, setup)
    stepped = [each for each in traced.parameters if each.is_stepped]
    marks: tuple[bool, ...] | None = None
    if setup.optimizer == "muon":
        block_of = places(traced.blocks)
        marks = tuple(block_of(each.name) >= 0 for each in stepped)
    elif setup.optimizer in EIGHT_BITS and setup.by_trainer:
        marks = tuple(each.embeds for each in stepped)
    optimizer = follow(share.forms, setup, cuda, marks)
    resident = [*share.resident, *optimizer.states]
    if cuda:
        resident += [Storage(setup.workspace, "workspaces", thread) for thread in ("forward", "backward")]
    step = [Event(each, True, "optimizer step") for each in share.copies]
    step += [*optimizer.events, *(Event(each, False, "optimizer step") for each in share.copies)]
    events = [*share.events, *step]
    if setup.accumulation > 1:
        # Later micro-batches add to the gradients of the first; their own gradients are freed after the addition.
        resident += [Storage(each.nbytes, each.part, each.module) for each in share.gradients]
        events = [*share.released(), *step]
    elif setup.release_gradients:
        events = [*share.released(lambda each: follow(((each.shape, getattr(torch, each.dtype)),), setup, cuda).events)]
    else:
        events += [Event(each, False, "optimizer step") for each in share.gradients]
    return Prediction(
        traced.training,
        setup,
        tuple(resident),
        tuple(events),
        peak_of(resident, events),
        (*traced.notes, *_assumptions(traced, setup), *share.notes),
        traced,
    )


def _assumptions(traced: Trace, setup: Setup) -> list[str]:
    freed = "freed after it (zero_grad(set_to_none=True))"
    if setup.release_gradients:
        freed = "freed in backward, one by one (memopt.release_gradients; none is clipped)"
    found = [
        f"Step: the second one, when the optimizer has its states; gradients are {freed}, and the model's output is "
        "held until backward has ended.",
        f"Optimizer: {OPTIMIZERS[setup.optimizer]}.",
    ]
    if setup.accumulation > 1:
        found.append("Accumulation: a later micro-batch, in whose forward the gradients of those before it live.")
    if idle := [each for each in traced.parameters if each.is_idle]:
        found.append(
            f"No gradient in this step: {gib(sum(each.nbytes for each in idle))} of trained weights, for example "
            f"{idle[0].name}; optimizers make no states for them (DeepSpeed does)."
        )
    if traced.training.train == "qlora" and setup.sharding in ("fsdp", "zero3"):
        found.append("Sharding: of 4-bit weights it needs bnb_4bit_quant_storage in the dtype of the other weights.")
    if traced.training.cuda_kernels:
        found.append(
            f"Device: CUDA context {setup.context / 2**20:.0f} MiB; two cuBLAS workspaces of "
            f"{setup.workspace / 2**20:.1f} MiB; one stream; "
            + ("expandable segments." if setup.expandable_segments else "the allocator's default segments.")
        )
    return found


def is_mask(storage: Storage) -> bool:
    """Whether `storage` is the mask of a dropout."""
    return storage.operation in ("native_dropout", "bernoulli_", "bernoulli") and storage.dtype in ("bool", "uint8")


def attention_remedy(found: Prediction, step: Step) -> Iterator[str]:
    """Advice on another attention implementation, if tensors of tokens x tokens exceed a share of the peak."""
    seq = step.training.seq
    if any(seq in each.shape for each in found.resident):
        return  # a width of the model: tensors of tokens x width have the same shape
    square = sum(each.nbytes for each in found.peak.alive if seq and each.shape[-2:] == (seq, seq))
    if square <= MATTERS * found.peak.nbytes:
        return
    supported = model_class(step.config)
    ways = [name for name, flag in FUSED.items() if name not in FLASH[1:] and getattr(supported, flag, False)]
    which = " or ".join(f"'{name}'" for name in ways)
    with_it = f"attn_implementation={which} makes none (--attention counts it)"
    advice = with_it if ways else "this model has no attention without them"
    yield f"{gib(square)} at the peak are tensors of tokens x tokens of eager attention: {advice}"
