"""Who keeps which bytes for backward: an account of one forward, real or traced.

Autograd says what it keeps through saved-tensor hooks; each storage is counted once, with all its bytes, for its
first holder. memopt's own hooks work inside of these and hand on only what they really keep, so the same account
measures stock and patched models. `live_bytes` is the independent check: it asks the allocator's side (which
storages are still alive), and so finds what hides from hooks, e.g. a tensor in an attribute of an autograd context.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from memopt.reporting.blocks import Blocks, Saved
from memopt.reporting.causes import Causes
from memopt.reporting.storages import StorageTracker
from memopt.torch_compat import tree_leaves
from memopt.walk.sites import Sites

#: Where a storage is first held: before, inside, between or after the repeated blocks; ``shared`` by several of them.
Part = Literal["embeddings", "block", "shared", "between", "head"]


@dataclass(frozen=True)
class Kept:
    """One storage that autograd keeps until backward."""

    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    """Shape of the tensor for which the storage was made (holders may see views of it)."""
    part: Part
    block: str
    """The block of the first holder; empty outside the blocks."""
    holders: tuple[tuple[str, str], ...]
    """(module, operation) of everyone who saved it, first holder first."""
    cause: str
    """What it is, in a user's words."""


@dataclass(frozen=True)
class Account:
    """Everything that one forward keeps for backward. Parameters, buffers and inputs are not in it."""

    kept: tuple[Kept, ...]
    blocks: tuple[str, ...]
    unseen: int = 0
    """Bytes that the graph keeps alive without saving them, e.g. keyword arguments of a checkpointed block."""
    unit: int = 0
    """Bytes of one unit: the hidden state (tokens x hidden size) that enters the first block, in the compute dtype.
    0 if no block was seen."""
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """All bytes kept for backward, those that hooks do not see included."""
        return self.saved + self.unseen

    @property
    def saved(self) -> int:
        """Bytes of the saved tensors alone."""
        return sum(kept.nbytes for kept in self.kept)

    def per_part(self) -> dict[Part, int]:
        """Bytes of each part that keeps any."""
        return _sums((kept.part, kept.nbytes) for kept in self.kept)

    def per_block(self) -> dict[str, int]:
        """Bytes that each block keeps for itself, in order of execution; what blocks share is not in it."""
        return {block: sum(kept.nbytes for kept in self.of_block(block)) for block in self.blocks}

    def per_cause(self, block: str | None = None) -> dict[str, int]:
        """Bytes of each cause, in one block or (None) in the whole model."""
        chosen = self.kept if block is None else self.of_block(block)
        return _sums((kept.cause, kept.nbytes) for kept in chosen)

    def of_block(self, block: str) -> tuple[Kept, ...]:
        """What `block` keeps for itself."""
        return tuple(kept for kept in self.kept if kept.part == "block" and kept.block == block)

    def units(self, nbytes: int) -> float:
        """`nbytes` in units; NaN if the unit is not known."""
        return nbytes / self.unit if self.unit else float("nan")


def account(
    model: nn.Module,
    run: Callable[[], Any],
    *,
    blocks: Sequence[str] = (),
    sites: Sites | None = None,
    notes: Sequence[str] = (),
) -> Account:
    """Count what autograd keeps of the forward that `run` makes.

    Args:
        model: gives modules their names; its parameters and buffers are not counted.
        run: one forward; returns the loss, or anything that holds it (a model output, a dict, a tuple). Whatever is
            not reachable from the returned tensors is not kept.
        blocks: names of the repeated blocks (``Sites.blocks``).
        sites: what the walk found; without it, norms and activations written as single operations are not named.
        notes: what a reader of the account should know.
    """
    running = Blocks(model, blocks)
    observer = running.observer
    parameters = [*model.parameters(), *model.buffers()]
    tracker = StorageTracker(observer.modules.current, observer.functions.current, parameters)
    with observer, tracker, saved_tensors_hooks(observer.pack, observer.unpack):
        graph = _graph(run())
    gc.collect()
    causes = Causes(sites)
    saved = [entry for entry in running.saved() if tracker.birth(entry.storage) is not None]
    kept = tuple(_kept(entry, tracker, running, causes) for entry in saved)
    unseen = tracker.alive_bytes() - sum(entry.nbytes for entry in kept)
    del graph
    return Account(kept, tuple(blocks), unseen, running.unit, tuple(notes))


def live_bytes(run: Callable[[], Any]) -> int:
    """Bytes of the storages that `run` created and its graph keeps alive, whoever refers to them.

    The returned tensors themselves are let go first (only their graph stays), so this equals `Account.total` unless
    something is kept that hooks do not see.
    """
    tracker = StorageTracker()
    with tracker:
        graph = _graph(run())
    gc.collect()
    nbytes = tracker.alive_bytes()
    del graph
    return nbytes


def _graph(result: Any) -> list[Any]:
    """The autograd nodes of everything in `result`, which may then be let go."""
    leaves = tree_leaves(dict(result) if isinstance(result, dict) else result)
    return [leaf.grad_fn for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]


def _kept(saved: Saved, tracker: StorageTracker, running: Blocks, causes: Causes) -> Kept:
    birth = tracker.birth(saved.storage)
    assert birth is not None
    holders = tuple(dict.fromkeys((save.module, save.operation) for save in saved.saves))
    first = saved.saves[0]
    block, entered = running.of(first), running.entered_before(first)
    part: Part
    if len({running.of(save) for save in saved.saves} - {""}) > 1:
        part = "shared"
    elif block:
        part = "block"
    elif entered == 0:
        part = "embeddings"
    else:
        part = "head" if entered == running.entered else "between"
    return Kept(
        nbytes=saved.storage.nbytes(),
        dtype=birth.dtype,
        shape=birth.shape,
        part=part,
        block=block,
        holders=holders,
        cause=causes.of(birth, holders, differentiable=first.differentiable),
    )


def _sums(pairs: Any) -> dict[Any, int]:
    sums: Counter[Any] = Counter()
    for key, nbytes in pairs:
        sums[key] += nbytes
    return dict(sums)
