"""The storages of a training step over time: when each is allocated and freed, and what it is for."""

from __future__ import annotations

import math
import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memopt.kernels.base.pieces import Mark, counting
from memopt.torch_compat import (
    current_node,
    device_read,
    is_module_call,
    next_sequence_number,
    no_torch_function,
    run_backward,
    sequence_number,
    storage_id,
    tree_leaves,
    weak_storage,
)
from memopt.trace.events import Part
from memopt.trace.operations import Operation, operation, temporaries
from memopt.trace.repeated import repeat
from memopt.trace.storages import Birth, Lifetime, StorageTracker, storages

#: Modules whose functions, where backward calls them, compute saved tensors again.
_RECOMPUTING = frozenset(
    {"memopt.kernels.replay.function", "memopt.recompute.specs", "memopt.saved.handles", "torch.utils.checkpoint"}
)
#: Modules that call the engine: for the step's backward, and for one inside of it.
_ENGINE_CALLERS = frozenset({run_backward.__module__, "torch.autograd"})


class Timeline(StorageTracker):
    """A `StorageTracker` that also records when storages are freed.

    It finds the running module on the call stack: with module hooks, patched modules would run differently.

    Args:
        model: the model whose step is traced.
        cuda: also count `temporaries` inside operators on a CUDA device (`memopt.trace.operations`).
    """

    def __init__(self, model: nn.Module, *, cuda: bool = False) -> None:
        super().__init__(self.module, parameters=[*model.parameters(), *model.buffers()])
        self._cuda = cuda
        self.events: list[Lifetime] = []
        """For each allocation or free, in order: the storage."""
        self.backward_begins = math.inf
        """The number of the first node that backward makes."""
        self.operations: list[Operation] = []
        self._names = {id(module): name for name, module in model.named_modules()}
        self._lives: dict[int, Lifetime] = {}
        self._watched: set[weakref.ref[torch.UntypedStorage]] = set()
        # For every allocation in a forward: the number that the next autograd node would get, and the module.
        self._numbers: list[float] = []
        self._modules: list[str] = []
        self._last = ""
        self._silent = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._silent:
            return func(*args, **(kwargs or {}))
        if func is device_read:
            return super().__torch_dispatch__(func, types, args, kwargs)
        moment = len(self.events)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        with no_torch_function():
            if self._cuda:
                self._note(func, (), {}, [torch.empty(shape, dtype=dtype) for shape, dtype in temporaries(func, args)])
            found = operation(func, args, kwargs or {}, result, moment)
        if found is not None:
            self.operations.append(found)
        return result

    def mark(self) -> Mark:
        """The number of events and of operations until now."""
        return len(self.events), len(self.operations)

    def repeat(self, first: Mark, second: Mark, count: int) -> bool:
        """See `memopt.kernels.base.pieces.PieceCounter`."""
        return repeat(self.events, self.operations, first, second, count)

    def lives(self, tensor: Tensor | None) -> set[Lifetime]:
        """Lifetimes of the storages behind `tensor`, without storages that were allocated before the timeline."""
        found = (self.life(storage) for storage in storages([] if tensor is None else [tensor]))
        return {life for life in found if life is not None}

    def life(self, storage: torch.UntypedStorage) -> Lifetime | None:
        """The lifetime of `storage`; None if it was allocated before the timeline."""
        return self._lives.get(storage_id(storage))

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Inside, nothing is recorded."""
        before, self._silent = self._silent, True
        try:
            yield
        finally:
            self._silent = before

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Inside, events and operations are recorded in separate lists; storages that live on are not watched after."""
        before, watched, parameters = (self.events, self.operations), set(self._watched), self._parameters
        self.events, self.operations, self._parameters = [], [], set(parameters)
        try:
            yield
        finally:
            ended = [life for moment, life in enumerate(self.events) if life.died == moment]
            strangers = [life for life in ended if life.born >= life.died or self.events[life.born] is not life]
            self.events, self.operations = before
            self._watched, self._parameters = watched, parameters
            for life in strangers:  # the garbage collector may free others meanwhile
                life.died = -1
                self.end(life)

    def is_parameter(self, storage: torch.UntypedStorage) -> bool:
        """Whether `storage` holds parameters or buffers of the model."""
        return storage_id(storage) in self._parameters

    def take_for_parameters(self, tensors: Iterable[Tensor]) -> None:
        """Let copies of `tensors` be ``of_parameter``."""
        self._parameters |= {storage_id(storage) for storage in storages(tensors)}

    def add(self, life: Lifetime, storage: torch.UntypedStorage | None = None) -> None:
        """Count a storage as allocated now; `storage` is None for one that is counted and not made."""
        life.born = len(self.events)
        self.events.append(life)
        if life.birth.module:
            self._numbers.append(next_sequence_number())
            self._modules.append(life.module)
        if storage is not None:
            self._born[storage_id(storage)] = (weak_storage(storage), life.birth)
            self._watch(storage, life)

    def end(self, life: Lifetime) -> None:
        """Count the storage of `life` as freed now, whether or not it is."""
        if life.died == -1:
            node = current_node()
            life.died, life.died_in = len(self.events), -1 if node is None else sequence_number(node)
            self.events.append(life)

    def _record(self, storage: torch.UntypedStorage, birth: Birth, args: Any) -> None:
        life = Lifetime(storage.nbytes(), birth, born=-1, module=birth.module)
        if birth.operation == "add" and isinstance(args[0], Tensor):
            life.before = next(iter(self.lives(args[0])), None)
        node = current_node()
        if node is not None:
            life.node = sequence_number(node)
            life.recomputed = bool(life.module) or _recomputes()
            life.module = life.module or self._module_of(life.node)
        self.add(life, storage)

    def _watch(self, storage: torch.UntypedStorage, life: Lifetime) -> None:
        def died(reference: weakref.ref[torch.UntypedStorage]) -> None:
            self._watched.discard(reference)
            self.end(life)

        self._lives[storage_id(storage)] = life
        self._watched.add(weakref.ref(storage, died))

    def _module_of(self, number: float) -> str:
        """The module that made the node of this number: the module of the first allocation after the node. A function
        that backward runs again makes nodes outside of modules: theirs is the module before them."""
        place = bisect_right(self._numbers, number)
        if place < len(self._modules):
            self._last = self._modules[place]
        return self._last if place < len(self._modules) or number >= self.backward_begins else ""

    def where(self) -> str:
        """The module whose forward or backward is running."""
        node = None if (name := self.module()) else current_node()
        return name if node is None else self._module_of(sequence_number(node))

    def module(self) -> str:
        """Name of the innermost module that is running; empty if none is, as in backward."""
        frame: Any = sys._getframe(3)
        while frame is not None and frame.f_globals.get("__name__") not in _ENGINE_CALLERS:
            if is_module_call(frame):
                name: str | None = self._names.get(id(frame.f_locals["self"]))
                if name is not None:
                    return name
            frame = frame.f_back
        return ""


@dataclass(frozen=True)
class Record:
    """The storages that a step allocated and freed."""

    events: Sequence[Lifetime]
    """For each allocation or free, in order: the storage."""
    forward_ends: int
    """Number of events before backward."""
    backward_ends: int
    """Number of events until the end of backward."""
    gradients: Collection[Lifetime]
    """Storages of gradients of parameters, and of the partial sums before them."""
    part_of: Callable[[Lifetime, int], Part]
    """Returns the purpose of a storage that is no parameter's gradient, given `forward_ends`."""
    operations: Sequence[Operation] = ()
    """The operations of the step, in order."""


def record(
    model: nn.Module,
    run: Callable[[], Any],
    *,
    during_backward: AbstractContextManager[Any] | None = None,
    then: Callable[[], Any] = lambda: None,
    within: Callable[[Timeline], AbstractContextManager[Any]] = nullcontext,
    cuda: bool = False,
) -> Record:
    """Record every storage of forward, loss and backward.

    Args:
        model: leaves its gradients in `grad`, which must be None before.
        run: one forward; returns the loss, or an output with it; without a loss, all outputs have a gradient. The
            output counts until backward has ended, as ``output = model(**batch); output.loss.backward()`` holds it.
        during_backward: a context to run backward in.
        then: called after backward, and recorded as well.
        within: returns a context around all of it.
        cuda: as in `Timeline`.
    """
    timeline = Timeline(model, cuda=cuda)
    with timeline, counting(timeline), within(timeline), _gradients(model, timeline) as gradients:
        output = run()
        forward_ends = len(timeline.events)
        part_of = _parts(model, output)
        timeline.backward_begins = next_sequence_number()
        with during_backward or nullcontext():
            run_backward(*losses_of(output))
        del output
        backward_ends = len(timeline.events)
        then()
        events, operations = tuple(timeline.events), tuple(timeline.operations)
        return Record(events, forward_ends, backward_ends, _with_sums(gradients), part_of, operations)


def losses_of(output: Any) -> list[Tensor]:
    """The loss in `output`; without one, all its tensors that have a gradient."""
    loss = getattr(output, "loss", None)
    leaves = [loss] if isinstance(loss, Tensor) else tree_leaves(dict(output) if isinstance(output, dict) else output)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


def _parts(model: nn.Module, output: Any) -> Callable[[Lifetime, int], Part]:
    logits = getattr(output, "logits", None)
    width = logits.shape[-1] if isinstance(logits, Tensor) and logits.dim() > 2 else None
    shapes = {tuple(each.shape) for each in model.parameters() if each.requires_grad}
    head, hidden = _head(model)

    def part(life: Lifetime, forward_ends: int) -> Part:
        shape = life.birth.shape
        if len(shape) > 1 and shape[-1] == width and shape not in shapes and shape[::-1] not in shapes:
            return "loss"
        if len(shape) > 1 and life.module in head and shape[-1] != hidden and shape not in shapes:
            return "loss"  # a part of them, or statistics
        if life.born < forward_ends:
            return "temporaries" if 0 <= life.died < forward_ends else "saved tensors"
        if life.recomputed:
            return "recomputed"
        return "temporaries" if life.node == life.died_in >= 0 else "activation gradients"

    return part


def _head(model: nn.Module) -> tuple[Collection[str], int]:
    """Names of the output layer and of the modules around it, which compute the loss; the layer's input width."""
    find: Callable[[], object] = getattr(model, "get_output_embeddings", lambda: None)
    head = find()
    name = next((name for name, module in model.named_modules() if module is head), None)
    if name is None:
        return (), 0
    parts = name.split(".")
    return {".".join(parts[:count]) for count in range(len(parts) + 1)}, int(getattr(head, "in_features", 0))


def _recomputes() -> bool:
    """Whether the operation that runs in backward computes a saved tensor again."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__")
        if name in _RECOMPUTING:
            return True
        if name in _ENGINE_CALLERS:
            break
        frame = frame.f_back
    return False


@contextmanager
def _gradients(model: nn.Module, timeline: Timeline) -> Iterator[set[Lifetime]]:
    """Collects, inside, the storages that become gradients of parameters."""
    found: set[Lifetime] = set()
    handles = [
        each.register_post_accumulate_grad_hook(lambda parameter: found.update(timeline.lives(parameter.grad)))
        for each in model.parameters()
        if each.requires_grad
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _with_sums(gradients: Iterable[Lifetime]) -> set[Lifetime]:
    """`gradients` and the partial sums before them: outside of a dispatch mode autograd sums in place."""
    found: set[Lifetime] = set()
    for each in gradients:
        life: Lifetime | None = each
        while life is not None and life not in found:
            found.add(life)
            life = life.before
    return found
