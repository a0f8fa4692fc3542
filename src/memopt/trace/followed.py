"""Trace one call of a function outside of a step: its storages, its operations and the tensors kept for backward.

The call runs between two autograd functions, which make its arguments and the gradients of its outputs, so that only
the call's own graph refers to them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from memopt.kernels.base.pieces import Mark
from memopt.recompute.pure import without_tensors
from memopt.torch_compat import current_node, run_backward, sequence_number, storage_id, tree_leaves
from memopt.trace.operations import Operation
from memopt.trace.storages import Lifetime
from memopt.trace.timeline import Timeline

#: Runs a call, given the tensors among its arguments, and returns its result.
Run = Callable[[Iterable[Tensor]], Any]


@dataclass(frozen=True)
class _Form:
    """Metadata of a tensor: its layout within one of several storages."""

    storage: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class Forms:
    """Metadata of several tensors and of their storages."""

    each: tuple[_Form, ...]
    sizes: tuple[int, ...]
    """Bytes of the storages."""

    def on(self, bases: Sequence[Tensor]) -> list[Tensor]:
        """Tensors of these forms on storages of the tensors `bases`."""
        return [bases[form.storage].as_strided(form.size, form.stride, form.offset) for form in self.each]

    def constants(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The members of `tensors` (tensors of these forms) that require no gradient."""
        return [tensor for tensor, form in zip(tensors, self.each, strict=True) if not form.requires_grad]

    def bases(self) -> list[Tensor]:
        """A new flat tensor for every storage."""
        dtypes = {form.storage: form.dtype for form in self.each}
        return [torch.empty(size // dtypes[at].itemsize, dtype=dtypes[at]) for at, size in enumerate(self.sizes)]


def forms_of(tensors: Iterable[Tensor]) -> tuple[Forms, list[torch.UntypedStorage]]:
    """The forms of `tensors` and their storages, in the order in which the forms number them."""
    places: dict[int, int] = {}
    storages: list[torch.UntypedStorage] = []
    forms = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage_id(storage) not in places:
            places[storage_id(storage)] = len(storages)
            storages.append(storage)
        place = places[storage_id(storage)]
        layout = tensor.size(), tensor.stride(), int(tensor.storage_offset())
        forms.append(_Form(place, *layout, tensor.dtype, tensor.requires_grad))
    return Forms(tuple(forms), tuple(each.nbytes() for each in storages)), storages


@dataclass(frozen=True)
class Call:
    """The key of alike calls, which allocate, free and compute alike."""

    arguments: Forms
    others: Hashable
    """The function, its arguments that are no tensors, and the context: grad mode, in backward or not, CUDA or not."""
    parameters: tuple[bool, ...]
    """For each storage of the arguments: whether it holds parameters or buffers."""
    graph: bool
    """Whether autograd records the call."""
    hooks: Literal["", "dropping", "keeping"] = ""
    """Under checkpointing: its hooks drop saved tensors in the first run and keep them when the block runs again."""


@dataclass
class Followed:
    """The record of one call: its forward, and its backward for those outputs that were given a gradient."""

    returned: Any
    """The result of the call, with a slot in place of each tensor."""
    outputs: Forms
    gradients: Forms
    has_gradient: list[bool]
    """For each tensor among the arguments: whether backward returned a gradient."""
    forward: list[tuple[bool, Lifetime]]
    """Allocations (True) and frees (False), in order."""
    backward: list[tuple[bool, Lifetime]]
    computed: tuple[list[Operation], list[Operation]]
    lives: tuple[list[Lifetime], ...]
    """Lifetimes of the storages of arguments, outputs, gradients of outputs, and gradients of arguments."""
    node: float
    """The number of the node in whose backward the function was called; -1 outside of backward."""


class Ends:
    """Both ends of a traced call: makes its arguments and the gradients of its outputs."""

    def __init__(self, timeline: Timeline, call: Call, wanted: tuple[bool, ...] | None) -> None:
        self.timeline, self.call, self.wanted = timeline, call, wanted
        self.lives: list[list[Lifetime]] = []
        self.marks: list[Mark] = []
        self.outputs = self.gradients = Forms((), ())
        self.has_gradient = [False] * len(call.arguments.each)

    def followed(self, run: Run) -> Followed | None:
        timeline, node = self.timeline, current_node()
        with timeline.apart(), torch.set_grad_enabled(self.call.graph), self._hooks():
            root = torch.zeros((), requires_grad=self.call.graph)
            tensors = _Arguments.apply(self, root)  # type: ignore[no-untyped-call]
            self.mark()
            returned = run(tensors)
            self.mark()
            outputs = [each for each in tree_leaves(returned) if isinstance(each, Tensor)]
            returned = without_tensors(returned)
            self.outputs = self.note(outputs)
            del tensors
            if keeps := self.call.graph and self.call.hooks != "dropping":
                last = _Taken.apply(self, *outputs)  # type: ignore[no-untyped-call]
                outputs.clear()
                run_backward(last)
                del last
            events, operations = list(timeline.events), list(timeline.operations)
        if self.call.graph and (
            len(self.lives) < 4 if keeps else not any(each.requires_grad for each in self.outputs.each)
        ):
            return None  # no argument gets a gradient
        self.lives += [[]] * (4 - len(self.lives))
        (a, first), (b, second), (c, third), (d, fourth) = (*self.marks, *2 * self.marks[-1:])[:4]
        steps = [(life.born == moment, life) for moment, life in enumerate(events)]
        ends = {life for each in self.lives for life in each}
        inside = {life for allocated, life in (*steps[a:b], *steps[c:d]) if allocated} - ends
        if any(life in inside for _, life in steps[b:c]):
            return None  # freed between forward and backward
        late = [(False, life) for _, life in steps[d:] if life in inside]
        return Followed(
            returned,
            self.outputs,
            self.gradients,
            self.has_gradient,
            steps[a:b],
            [*steps[c:d], *late],
            (_since(operations[first:second], a), _since(operations[third:fourth], c)),
            tuple(self.lives),
            -1 if node is None else sequence_number(node),
        )

    def _hooks(self) -> AbstractContextManager[object]:
        """Saved-tensor hooks that replace the hooks around the call."""
        if not self.call.hooks:
            return nullcontext()
        drops = self.call.hooks == "dropping"
        # Checkpointing returns each recomputed tensor once.
        return saved_tensors_hooks(lambda saved: None if drops else [saved.detach()], lambda held: held.pop())

    def mark(self) -> None:
        self.marks.append(self.timeline.mark())

    def note(self, tensors: Iterable[Tensor]) -> Forms:
        """Note the lifetimes of `tensors`; returns their forms."""
        forms, storages = forms_of(tensors)
        self.lives.append([life for each in storages if (life := self.timeline.life(each)) is not None])
        return forms

    def make(self) -> list[Tensor]:
        bases = self.call.arguments.bases()
        self.timeline.take_for_parameters(base for base, yes in zip(bases, self.call.parameters, strict=True) if yes)
        made = self.call.arguments.on(bases)
        self.note(made)
        return made

    def give(self) -> list[Tensor | None]:
        wanted = self.wanted or tuple(form.requires_grad for form in self.outputs.each)
        made = [
            torch.empty_strided(form.size, form.stride, dtype=form.dtype) if yes else None
            for form, yes in zip(self.outputs.each, wanted, strict=True)
        ]
        self.note(each for each in made if each is not None)
        self.mark()
        return made

    def end(self, gradients: Sequence[Tensor | None]) -> None:
        self.mark()
        self.has_gradient = [each is not None for each in gradients]
        self.gradients = self.note(each for each in gradients if each is not None)


def _since(operations: Iterable[Operation], moment: int) -> list[Operation]:
    return [each.at(each.moment - moment) for each in operations]


class _Arguments(torch.autograd.Function):
    """Makes the arguments of a call, and takes their gradients."""

    @staticmethod
    def forward(ctx: Any, ends: Ends, root: Tensor) -> tuple[Tensor, ...]:
        ctx.ends = ends
        ctx.set_materialize_grads(False)
        made = ends.make()
        ctx.mark_non_differentiable(*ends.call.arguments.constants(made))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None]:
        ctx.ends.end(gradients)
        return None, None


class _Taken(torch.autograd.Function):
    """Takes the outputs of a call, and makes their gradients."""

    @staticmethod
    def forward(ctx: Any, ends: Ends, *outputs: Tensor) -> Tensor:
        ctx.ends = ends
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.ends.give()
