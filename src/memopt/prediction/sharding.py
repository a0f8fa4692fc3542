"""The bytes of one of several devices: sharding divides some storages and adds buffers.

DDP: torch/nn/parallel/distributed.py. FSDP2: torch/distributed/fsdp/_fully_shard (a group for each block, and one for
the rest), within a percent of PyTorch's FSDPMemTracker. ZeRO: the tensors that DeepSpeed 0.19 holds in two processes on
the CPU (docs/fit.md lists those compared), with its default settings (deepspeed/runtime/zero/config.py). Bytes are
those of the device that holds most.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

import torch

from memopt.prediction.optimizers import Form
from memopt.prediction.setup import Setup
from memopt.trace.events import Event, Storage, Trace
from memopt.trace.training import Step
from memopt.walk.models.alike import places

#: Elements in DeepSpeed's ``reduce_bucket_size``, ``stage3_prefetch_bucket_size``,
#: ``stage3_param_persistence_threshold`` and ``stage3_max_live_parameters``.
_REDUCED, _PREFETCHED, _PERSISTENT, _LIVE = 500_000_000, 50_000_000, 100_000, 1_000_000_000


@dataclass(frozen=True)
class Share:
    """The part of a step that one device holds."""

    resident: tuple[Storage, ...]
    events: tuple[Event, ...]
    """Allocations and frees of forward and backward."""
    gradients: tuple[Storage, ...]
    """Storages of `events` that are freed after the optimizer's step."""
    forms: tuple[Form, ...]
    """Shapes and dtypes of the parameters that the optimizer steps."""
    copies: tuple[Storage, ...] = ()
    """Storages that live only in the optimizer's step, beside its own allocations."""
    notes: tuple[str, ...] = ()

    def released(self, step_of: Callable[[Storage], Iterable[Event]] = lambda _: ()) -> Iterator[Event]:
        """`events`, where each gradient is freed once it is complete, after the optimizer's step of its parameter
        (`step_of`); without a step, a later micro-batch adds it to the gradient that lives already.

        A gradient is complete when another module allocates and, if it is a sum, its last term has been added.
        """
        added = {
            (event.storage.shape, event.storage.dtype): at
            for at, event in enumerate(self.events)
            if event.storage.part == "gradients" and not event.allocated
        }
        left, waiting = set(self.gradients), list[Storage]()

        def step(complete: Iterable[Storage]) -> Iterator[Event]:
            for each in complete:
                waiting.remove(each)
                yield from (*step_of(each), Event(each, False, "backward"))

        for at, event in enumerate(self.events):
            if event.allocated:
                others = [each for each in waiting if each.module != event.storage.module]
                yield from step(each for each in others if added.get((each.shape, each.dtype), -1) < at)
                waiting += {event.storage} & left
            yield event
        yield from step(tuple(waiting))


def step_of_device(of: Step, setup: Setup) -> Step:
    """`of` as each device runs it: under FSDP's mixed precision, which Trainer and accelerate turn on beside autocast,
    weights are gathered in 16 bits from fp32 shards."""
    gathers = setup.sharding == "fsdp" and of.training.precision.endswith("mixed")
    return of.trained(gathers_16_bits=True) if gathers else of


def shard(traced: Trace, setup: Setup) -> Share:
    """The share of one of ``setup.devices``."""
    forms = tuple((each.shape, each.dtype) for each in traced.parameters if each.is_stepped)
    whole = Share(tuple(traced.resident()), traced.events, traced.gradients, forms)
    if setup.sharding == "none":
        return whole
    if setup.sharding == "ddp":
        buckets = _buffer(sum(each.nbytes for each in traced.gradients), "gradient buckets")
        note = "DDP: gradients are copied into buckets (gradient_as_bucket_view=False, its default)."
        return replace(whole, resident=(*whole.resident, buckets), notes=(note,))
    if setup.sharding == "fsdp":
        return _fsdp(traced, setup.devices)
    return _zero(traced, setup.devices, int(setup.sharding[-1]))


def _fsdp(traced: Trace, devices: int) -> Share:
    # With mixed precision, shards of weights, gradients and states are in fp32, and all else is in 16 bits. Accelerate
    # gives fp32 to trained weights of a model that was loaded in 16 bits, and leaves the others.
    training = traced.training
    in_fp32 = training.is_under_autocast

    def kept(nbytes: int, dtype: torch.dtype, trained: bool = True) -> int:
        is_wide = dtype.is_floating_point and (training.gathers_16_bits or (in_fp32 and trained))
        return nbytes // dtype.itemsize * 4 if is_wide else nbytes

    block_of = places(traced.blocks)
    groups: Counter[int] = Counter()
    for each in traced.parameters:
        if not each.is_buffer:
            groups[block_of(each.name)] += each.nbytes
    rest = groups.pop(-1, 0)
    largest = max(groups.values(), default=0)
    # Forward leaves the group around the blocks gathered. Beside it live one block's parameters and one flat buffer: in
    # forward of the same block or the one before, in backward of the next.
    gathered = [_buffer(rest, "all-gather"), *(_buffer(largest, "all-gather") for _ in range(2))]
    *weights, batch = traced.resident()
    shards: list[Storage] = []
    gradients: list[Storage] = []
    for each, storage in zip(traced.parameters, weights, strict=True):
        rows = each.shape[0] if each.shape and not each.is_buffer else 0
        size = each.nbytes // rows * -(-rows // devices) if rows else each.nbytes
        shards.append(replace(storage, nbytes=size if each.is_buffer else kept(size, each.dtype, each.trained)))
    shards.append(batch)
    of_group: defaultdict[int, list[Storage]] = defaultdict(list)
    for gradient in traced.gradients:
        of_group[block_of(gradient.module)].append(gradient)
    events = [Event(each, True, "forward") for each in gathered]
    before: list[Storage] = []
    left = set(of_group) - {-1}

    def scatter(group: int) -> None:
        # Free the gathered group and the flat buffer of the group before; copy the group's gradients into a new buffer.
        nbytes, module = sum(each.nbytes for each in of_group[group]), "" if group < 0 else traced.blocks[group]
        shard = sum(kept(each.nbytes, getattr(torch, each.dtype)) for each in of_group[group])
        flat, part = _buffer(nbytes, "reduce-scatter"), Storage(-(-shard // devices), "gradients", module)
        events.extend(Event(each, False, "backward") for each in (*before, gathered.pop()))
        events.extend([Event(flat, True, "backward"), *(Event(each, False, "backward") for each in of_group[group])])
        events.append(Event(part, True, "backward"))
        gradients.append(part)
        before[:] = [flat]
        left.discard(group)
        if group >= 0 and len(left) > 1:  # the last block's parameters are gathered already
            gathered.append(_buffer(largest, "all-gather"))
            events.append(Event(gathered[-1], True, "backward"))

    for event in traced.events:
        events.append(event)
        group = block_of(event.storage.module)
        if group >= 0 and event.allocated and of_group[group] and of_group[group][-1] is event.storage:
            scatter(group)
    scatter(-1)  # after backward
    events += [Event(each, False, "backward") for each in (*before, *gathered)]
    forms = tuple(
        (
            (-(-each.shape[0] // devices), *each.shape[1:]) if each.shape else (),
            torch.float32 if in_fp32 else each.dtype,
        )
        for each in traced.parameters
        if each.is_stepped
    )
    how = "fp32, gathered and reduced in 16 bits (mixed precision)" if in_fp32 else "the dtype of the weights"
    note = (
        "FSDP2: a group for each block and one for the rest; gathered are the rest, the running block, and a flat "
        f"buffer of one block; weights, gradients and states in {how}; no offload."
    )
    return Share(tuple(shards), tuple(events), tuple(gradients), forms, notes=(note,))


def _zero(traced: Trace, devices: int, stage: int) -> Share:
    trained = [each for each in traced.parameters if each.trained]  # flattened whether they have gradients or not
    elements = sum(prod(each.shape) for each in trained)
    width = max((each.dtype.itemsize for each in trained), default=2)
    part = -(-elements // devices)
    resident = [each for each in traced.resident() if stage < 3 or each.part != "weights"]
    buffers = [_REDUCED * width]  # full size, even if there are fewer gradients
    if stage == 3:
        large = [each for each in traced.parameters if not each.is_buffer and prod(each.shape) >= _PERSISTENT]
        divided = sum(each.nbytes for each in large)
        small = sum(each.nbytes for each in traced.parameters) - divided
        resident.append(Storage(small + -(-divided // devices), "weights"))
        buffers.append(round(divided * min(1, (_LIVE + _PREFETCHED) / max(1, sum(prod(each.shape) for each in large)))))
    # An fp32 copy of the device's part of the weights, even if the weights are fp32.
    resident.append(Storage(4 * part, "optimizer states", "", "fp32 weights", "float32", (part,)))
    resident += [_buffer(nbytes, "buckets") for nbytes in buffers]
    events, gradients = list(traced.events), list(traced.gradients)
    if stage > 1:
        # A gradient is reduced from a bucket; the device keeps its own part and frees the whole.
        events, gradients = [], []
        whole = set(traced.gradients)
        for event in traced.events:
            events.append(event)
            if event.allocated and event.storage in whole:
                kept = replace(event.storage, nbytes=-(-event.storage.nbytes // devices))
                events += [Event(kept, True, event.moment), Event(event.storage, False, event.moment)]
                gradients.append(kept)
    copies = [Storage(4 * part, "gradients", "", "fp32 gradients", "float32", (part,))]
    parts = {1: "optimizer states", 2: "states and gradients", 3: "states, gradients and weights"}[stage]
    note = (
        f"ZeRO-{stage}: {parts} over {devices} devices; the optimizer steps fp32 copies of the device's part; "
        f"DeepSpeed's default buckets ({_REDUCED:,} elements), no offload."
    )
    return Share(tuple(resident), tuple(events), tuple(gradients), (((part,), torch.float32),), tuple(copies), (note,))


def _buffer(nbytes: int, operation: str) -> Storage:
    return Storage(nbytes, "communication", "", operation)
