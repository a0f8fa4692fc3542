"""An account of one forward, real or traced: how many bytes each operation saves for backward.

Saved-tensor hooks see every saved tensor. Each storage counts once, with all its bytes, at its first save. memopt's own
hooks run inside these hooks and pass on the tensors that they really save, so one account measures both stock and
patched models. `live_bytes` is an independent check: it counts live storages, so it also finds tensors that hooks do
not see, e.g. an attribute of an autograd context.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from memopt.saved.observer import CHECKPOINT, Save, SavedTensorObserver
from memopt.torch_compat import storage_id, tree_leaves
from memopt.trace.causes import EXPERTS, EXPERTS_NOTE, Causes
from memopt.trace.events import Activations, Trace
from memopt.trace.storages import Birth, StorageTracker, storages
from memopt.walk.sites import Sites


class Blocks:
    """Follows the repeated blocks of a model while it runs under `observer`."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.observer = SavedTensorObserver(model, entered=self._enter)
        self.unit = 0
        """Bytes of the first block's input in the compute dtype."""
        self._names = frozenset(names)
        self.called: dict[int, str] = {}
        """For each call of a block that has begun: the number of calls of modules until then -> the block."""

    def of(self, save: Save) -> str:
        """The innermost block that was running at `save`, or whose checkpoint saved; empty outside the blocks.

        Older transformers releases checkpoint a block from outside: the block is then the next module that is entered.
        """
        running = next((name for name in reversed(save.modules) if name in self._names), "")
        if running or save.operation != CHECKPOINT:
            return running
        return self.called.get(save.modules_entered + 1, "")

    def saved(self) -> Iterable[tuple[torch.UntypedStorage, list[Save]]]:
        """The storages that autograd still holds, each with its saves in order, in order of their first save."""
        held: dict[int, tuple[torch.UntypedStorage, list[Save]]] = {}
        for tensor, save in self.observer.saves():
            for storage in storages([tensor]):
                held.setdefault(storage_id(storage), (storage, []))[1].append(save)
        return held.values()

    def _enter(self, name: str, args: tuple[Any, ...]) -> None:
        if name in self._names:
            self.called[self.observer.modules.entered] = name
            self.unit = self.unit or _hidden_bytes(args)


def _hidden_bytes(args: tuple[Any, ...]) -> int:
    hidden = next((arg for arg in args if isinstance(arg, Tensor) and arg.is_floating_point()), None)
    if hidden is None:
        return 0
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    return hidden.numel() * dtype.itemsize


#: Where a storage is saved first: before, inside, between or after the repeated blocks; ``shared`` by several of them.
Part = Literal["embeddings", "block", "shared", "between", "head"]


@dataclass(frozen=True)
class SavedStorage:
    """One storage that autograd holds until backward."""

    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    """Shape of the tensor that the storage was allocated for (views of it may be saved)."""
    part: Part
    block: str
    """The block that saved it first; empty outside the blocks."""
    savers: tuple[tuple[str, str], ...]
    """(module, operation) of each save, in order."""
    cause: str
    """One of `memopt.trace.causes.CAUSES`."""
    module: str = ""
    """The innermost module that was running when it was allocated; for codes and copies of views, when the replaced
    tensor was allocated."""

    @property
    def savers_modules(self) -> frozenset[str]:
        """The modules that save it."""
        return frozenset(module for module, _ in self.savers)


@dataclass(frozen=True)
class Account:
    """Everything that one forward saves for backward, without parameters, buffers and inputs."""

    storages: tuple[SavedStorage, ...]
    blocks: tuple[str, ...]
    unseen: int = 0
    """Bytes that the graph keeps alive outside of saved tensors, e.g. keyword arguments of a checkpointed block."""
    unit: int = 0
    """Bytes of one unit: the hidden state (tokens x hidden size) that enters the first block, in the compute dtype.
    0 if no block was seen."""
    notes: tuple[str, ...] = ()
    trace: Trace | None = None
    """The whole step; None if no backward was run."""

    @property
    def total(self) -> int:
        """All bytes that live until backward, also those that hooks do not see."""
        return self.saved + self.unseen

    @property
    def saved(self) -> int:
        """Bytes of the saved tensors alone."""
        return sum(storage.nbytes for storage in self.storages)

    @property
    def step(self) -> Activations | None:
        """Live storages over forward and backward; None if no backward was traced."""
        return None if self.trace is None else self.trace.activations

    def per_part(self) -> dict[Part, int]:
        """Bytes of each part that saves any."""
        return _sums((storage.part, storage.nbytes) for storage in self.storages)

    def per_block(self) -> dict[str, int]:
        """Block -> bytes that this block alone saves, in order of execution; shared storages are left out."""
        return {block: sum(storage.nbytes for storage in self.of_block(block)) for block in self.blocks}

    def per_cause(self, block: str | None = None) -> dict[str, int]:
        """Bytes of each cause, in one block or (None) in the whole model."""
        chosen = self.storages if block is None else self.of_block(block)
        return _sums((storage.cause, storage.nbytes) for storage in chosen)

    def of_block(self, block: str) -> tuple[SavedStorage, ...]:
        """The storages that `block` alone saves."""
        return tuple(each for each in self.storages if each.part == "block" and each.block == block)

    def block_of(self, module: str) -> str:
        """The block that `module` is, or is inside; empty outside the blocks."""
        return next((block for block in self.blocks if f"{module}.".startswith(f"{block}.")), "")

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
    """Count the tensors that the forward `run` saves for backward.

    Args:
        model: its parameters and buffers are not counted.
        run: one forward; returns the loss, or anything that holds it (a model output, a dict, a tuple). A graph that
            is not reachable from the returned tensors is not counted.
        blocks: names of the repeated blocks (``Sites.blocks``).
        sites: the sites of the model; without them, norms and activations of several operations are not recognised.
        notes: sentences for the reader of the account.
    """
    running = Blocks(model, blocks)
    observer = running.observer
    parameters = [*model.parameters(), *model.buffers()]
    tracker = StorageTracker(observer.modules.current, observer.functions.current, parameters)
    with observer, tracker, saved_tensors_hooks(observer.pack, observer.unpack):
        graph = _graph(run())
    gc.collect()
    causes = Causes(sites)
    counted = tuple(
        _described(birth, storage.nbytes(), saves, tracker, running, causes)
        for storage, saves in running.saved()
        if (birth := tracker.birth(storage_id(storage))) is not None
    )
    unseen = sum(each.nbytes() for each, _ in tracker.alive()) - sum(entry.nbytes for entry in counted)
    del graph
    if any(each.cause == EXPERTS for each in counted):
        notes = (*notes, EXPERTS_NOTE)
    return Account(counted, tuple(blocks), unseen, running.unit, tuple(notes))


def live_bytes(run: Callable[[], Any]) -> int:
    """Bytes of the storages that `run` allocated and that are alive when only its graph is kept.

    The returned tensors are freed first. Any reference counts. The result equals `Account.total` if hooks miss nothing.
    """
    return live_by_module(run, StorageTracker()).total()


def live_by_module(run: Callable[[], Any], tracker: StorageTracker) -> Counter[str]:
    """The bytes of `live_bytes` by the module that `tracker` finds."""
    with tracker:
        graph = _graph(run())
    gc.collect()
    live = Counter(_sums((birth.module, storage.nbytes()) for storage, birth in tracker.alive()))
    del graph
    return live


def _graph(result: Any) -> list[Any]:
    """Gradient edges that keep the graph of every tensor in `result` alive after these tensors are freed. Before
    PyTorch 2.13, a reference to the node of a `torch.autograd.Function` does not keep its graph alive."""
    leaves = tree_leaves(dict(result) if isinstance(result, dict) else result)
    return [get_gradient_edge(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]


def _described(
    birth: Birth, nbytes: int, saves: Sequence[Save], tracker: StorageTracker, running: Blocks, causes: Causes
) -> SavedStorage:
    savers = tuple(dict.fromkeys((save.module, save.operation) for save in saves))
    first = saves[0]
    original = tracker.birth(first.instead_of)
    is_same = original is None or (birth.copy_of is original and birth.dtype == original.dtype)
    block, entered = running.of(first), bisect_right(list(running.called), first.modules_entered)
    part: Part
    if len({running.of(save) for save in saves} - {""}) > 1:
        part = "shared"
    elif block:
        part = "block"
    elif entered == 0:
        part = "embeddings"
    else:
        part = "head" if entered == len(running.called) else "between"
    return SavedStorage(
        nbytes=nbytes,
        dtype=birth.dtype,
        shape=birth.shape,
        part=part,
        block=block,
        savers=savers,
        cause=causes.of(birth, savers, differentiable=first.differentiable) if is_same else "codes",
        module=(original or birth).module,
    )


def _sums(pairs: Any) -> dict[Any, int]:
    sums: Counter[Any] = Counter()
    for key, nbytes in pairs:
        sums[key] += nbytes
    return dict(sums)
