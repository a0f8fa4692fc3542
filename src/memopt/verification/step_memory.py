"""Compares live bytes of patched and stock modules: the peak of a step, the bytes alive after backward, and the bytes
that a second step adds.

Both models are small copies of one model (`memopt.verification.pairs`). Every storage that PyTorch allocates is
followed; ``tracemalloc`` counts NumPy's arrays. Replacing patched modules with stock ones finds the module at fault.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from memopt.patches.capabilities import Checks
from memopt.patches.checks import Check, limited, worst_name
from memopt.patches.record import record_of
from memopt.patches.registry import having
from memopt.torch_compat import storage_id
from memopt.trace.storages import Lifetime, storages
from memopt.trace.timeline import Timeline
from memopt.verification.models import cast_inputs
from memopt.verification.modules import Worst, culprit
from memopt.verification.pairs import Pair, with_pair
from memopt.verification.situations import without_dropout
from memopt.verification.trial import CheckpointTrial, loss_of
from memopt.walk.calls.batch import Batch
from memopt.walk.calls.preserve import preserved
from memopt.walk.sites import is_inside

_CHECKS = {
    "behind": ("memory.after_backward", "bytes alive after backward beyond stock", "backward frees what it read"),
    "second": ("memory.second_step", "bytes that a second step adds to that beyond stock", "no step adds to a cache"),
    # Without kernels, one module in backward may hold a result more than stock's kernel: x_hat, or its output again.
    # One that runs again holds what stock modules save.
    "peak": ("memory.peak", "peak of live bytes in a step beyond stock and a result", "patching must save"),
    "arrays": ("memory.arrays", "bytes of NumPy arrays after the forward beyond stock", "saved values are in tensors"),
}  # fmt: skip
_STOCK = "stock modules, same weights and inputs"
#: Bytes that a module's forward may allocate and free beyond stock, as a multiple of its largest storage. Without
#: kernels, an operator of several steps holds two intermediate results, in fp32, where stock holds one.
_TRANSIENT = 3.0


@dataclass(frozen=True)
class Lived:
    """Bytes without parameters, buffers, inputs and gradients of parameters, which every step ends with."""

    peak: int
    arrays: int
    behind: int
    second: int
    transient: dict[str, _Transient]
    """Module -> bytes of its forward."""


class _Transient(NamedTuple):
    """Bytes of one module in a forward of the model."""

    most: int = 0
    """Alive at once, of those freed inside of the call that allocated them."""
    largest: int = 1
    """Of one storage."""
    left: int = 0
    """Alive after the call: results, and what is saved."""
    saved: int = 0
    """Alive after the forward."""


def verify_step(trial: CheckpointTrial) -> list[Check]:
    """Two steps of the patched model and of stock modules, the first in eval mode, the second in train mode."""
    return with_pair(trial, lambda pair: list(_checks(pair, trial.exact))) or []


def _checks(pair: Pair, approximates: Collection[str]) -> Iterator[Check]:
    for model in (pair.stock, pair.patched):
        pair.convert(model, torch.float32)  # in fp32 operators make no copies in another dtype
    batch = cast_inputs({**pair.probes.batches[0], **pair.probes.targets[0]}, torch.float32)
    stock, patched = lived(pair.stock, batch), lived(pair.patched, batch)
    if not approximates:  # making codes takes memory for a moment
        yield _transient(pair, stock, patched)
    for name, (id, metric, reason) in _CHECKS.items():
        if approximates and name == "peak":
            continue
        allowed, found = getattr(stock, name), getattr(patched, name)
        subject, more = f"{len(pair.swapped)} modules", 0
        if found > allowed:
            subject = _culprit(pair, batch, name, allowed)
            if name == "peak":
                before, its = (each.transient.get(subject, _Transient()) for each in (stock, patched))
                more = max(its.largest, before.largest, before.saved - its.saved)
        yield limited(
            id, subject, float(max(found - allowed - more, 0)), 0.0, metric, reason, _STOCK, found,
            f"stock {allowed} bytes, patched {found}",
        )  # fmt: skip


def _transient(pair: Pair, stock: Lived, patched: Lived) -> Check:
    record, excess = record_of(pair.patched), {}
    frees = {name for patch in having(Checks) for name in (patch.frees(record.plan) if record is not None else ())}
    for name in (name for name, _ in pair.swapped if name in patched.transient):
        found, before = patched.transient[name], stock.transient.get(name, _Transient())
        allowed = before.most + max(0, before.left - found.left) * (name in frees)
        excess[name] = max(0, found.most - allowed) / found.largest
    worst = worst_name(excess)
    value = excess.get(worst, 0.0)
    subject = (worst or "the model") if value > _TRANSIENT else f"{len(excess)} modules"
    return limited(
        "memory.transient", subject, value, _TRANSIENT,
        "bytes allocated and freed in a forward beyond stock / largest tensor",
        "two intermediate results, in fp32, on a CPU", _STOCK, len(excess),
    )  # fmt: skip


def _culprit(pair: Pair, batch: Batch, name: str, allowed: int) -> str:
    """The first patched module with which the bytes exceed the limit."""

    def run(patched: int) -> Worst:
        with pair.with_stock(patched):
            return Worst(getattr(lived(pair.patched, batch), name), "")

    return culprit(run, allowed, pair.swapped, lambda: "the model")


def lived(model: nn.Module, batch: Batch) -> Lived:
    """The live bytes over two steps of `model`."""
    model.zero_grad(set_to_none=True)
    started = not tracemalloc.is_tracing()
    if started:
        tracemalloc.start()
    try:
        with preserved(model):
            arrays = -_array_bytes()
            timeline = _Calls(model)
            with timeline:
                loss = loss_of(model(**batch))
                ends = len(timeline.events)
                arrays += _array_bytes()
                loss.backward()
                del loss
                gc.collect()
                behind, peak = _left(timeline, model), _peak(timeline, model)
                with without_dropout(model):
                    loss_of(model.train()(**batch)).backward()
                gc.collect()
                second = _left(timeline, model) - behind
        transient = _transients(timeline, ends)
        return Lived(peak, arrays, behind, second, transient)
    finally:
        if started:
            tracemalloc.stop()
        model.zero_grad(set_to_none=True)


def _peak(timeline: Timeline, model: nn.Module) -> int:
    """The peak of the step that has just ended."""
    gradients = set[Lifetime]().union(*(timeline.lives(p.grad) for p in model.parameters()))
    lives = ((at, life) for at, life in enumerate(timeline.events) if life not in gradients)
    return max(accumulate((life.nbytes if life.born == at else -life.nbytes for at, life in lives), initial=0))


class _Calls(Timeline):
    """Also tells which storages were freed inside of the call that allocated them: results live longer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.inside = set[Lifetime]()

    def end(self, life: Lifetime) -> None:
        super().end(life)
        if life.module and is_inside(self.module(), life.module):
            self.inside.add(life)


def _transients(timeline: _Calls, until: int) -> dict[str, _Transient]:
    now, found = Counter[str](), dict[str, _Transient]()
    for moment, life in enumerate(timeline.events[:until]):
        born, name = life.born == moment, life.module
        is_freed = 0 <= life.died < until
        if is_freed and life in timeline.inside:
            now[name] += life.nbytes if born else -life.nbytes
        most, largest, left, saved = found.get(name, _Transient())
        left += 0 if is_freed and life in timeline.inside else life.nbytes
        saved += 0 if is_freed else life.nbytes
        found[name] = _Transient(max(most, now[name]), max(largest, life.nbytes), left, saved)
    return found


def _left(timeline: Timeline, model: nn.Module) -> int:
    gradients = {storage_id(each) for each in storages(p.grad for p in model.parameters() if p.grad is not None)}
    return sum(each.nbytes() for each, _ in timeline.alive() if storage_id(each) not in gradients)


def _array_bytes() -> int:
    traces = tracemalloc.take_snapshot().filter_traces([tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)])
    return sum(each.size for each in traces.statistics("filename"))
