"""The live storages of a training step over its time: when each was allocated and freed, and what lives at the peak."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from memopt.reporting.storages import Birth, StorageTracker, storages
from memopt.torch_compat import run_backward, storage_id

Phase = Literal["forward", "backward"]


@dataclass(eq=False)
class Lifetime:
    """One storage of a step. `born` and `died` count allocations and frees; `died` is -1 while it lives."""

    nbytes: int
    birth: Birth
    phase: Phase
    """Of the step, when it was allocated."""
    born: int
    died: int = -1
    before: Lifetime | None = None
    """The first operand of the sum that it holds."""


class Timeline(StorageTracker):
    """A `StorageTracker` that also sees storages die. Arguments are those of `StorageTracker`."""

    def __init__(
        self,
        module: Callable[[], str] = str,
        function: Callable[[], str] = str,
        parameters: Iterable[Tensor] = (),
    ) -> None:
        super().__init__(module, function, parameters)
        self.phase: Phase = "forward"
        self.events: list[Lifetime] = []
        """The storage that was allocated or freed, in order."""
        self._lives: dict[int, Lifetime] = {}
        self._watched: set[weakref.ref[torch.UntypedStorage]] = set()

    def life(self, tensor: Tensor) -> Lifetime | None:
        """The lifetime of the storage behind `tensor`; None if it was allocated before."""
        return next((self._lives.get(storage_id(storage)) for storage in storages([tensor])), None)

    def _record(self, storage: torch.UntypedStorage, birth: Birth, args: Any) -> None:
        super()._record(storage, birth, args)
        life = Lifetime(storage.nbytes(), birth, self.phase, born=len(self.events))
        if birth.operation == "add" and isinstance(args[0], Tensor):
            life.before = self.life(args[0])
        self._lives[storage_id(storage)] = life
        self.events.append(life)

        def died(reference: weakref.ref[torch.UntypedStorage]) -> None:
            life.died = len(self.events)
            self.events.append(life)
            self._watched.discard(reference)

        self._watched.add(weakref.ref(storage, died))


@dataclass(frozen=True)
class Step:
    """The live storages of one step, without parameters, buffers, inputs and the gradients of parameters."""

    kept: int
    """Bytes that live between forward and backward."""
    peak: int
    """The most bytes that live at one time."""
    at_peak: tuple[Lifetime, ...]
    """The storages that live then, in order of their allocation."""


def step(model: nn.Module, run: Callable[[], Any]) -> Step:
    """Follow the storages over forward, loss and backward.

    Args:
        model: leaves its gradients in `grad`, which must be None before.
        run: one forward; returns an output with a `loss`, which is held until backward has ended, as
            ``output = model(**batch); output.loss.backward()`` holds it.
    """
    timeline = Timeline(parameters=[*model.parameters(), *model.buffers()])
    gradients: list[Lifetime] = []

    def accumulated(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if (life := timeline.life(parameter.grad)) is not None:
            gradients.append(life)

    handles = [
        each.register_post_accumulate_grad_hook(accumulated) for each in model.parameters() if each.requires_grad
    ]
    try:
        with timeline:
            output = run()
            timeline.phase, forward_ends = "backward", len(timeline.events)
            run_backward(output.loss)
    finally:
        for handle in handles:
            handle.remove()
    left_out = _with_sums(gradients)
    counted = [0]
    for moment, life in enumerate(timeline.events):
        change = 0 if life in left_out else life.nbytes if life.born == moment else -life.nbytes
        counted.append(counted[-1] + change)
    top = max(range(len(counted)), key=counted.__getitem__)
    at_peak = (each for moment, each in enumerate(timeline.events[:top]) if each.born == moment)
    alive = tuple(each for each in at_peak if each not in left_out and not 0 <= each.died < top)
    return Step(kept=counted[forward_ends], peak=counted[top], at_peak=alive)


def _with_sums(gradients: Iterable[Lifetime]) -> set[Lifetime]:
    """`gradients` and what they were summed up in before: autograd adds in place where no mode looks on."""
    found: set[Lifetime] = set()
    for each in gradients:
        life: Lifetime | None = each
        while life is not None and life not in found and life.phase == "backward":
            found.add(life)
            life = life.before
    return found
