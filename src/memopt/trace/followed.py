"""What one call of a function allocates, frees, computes and keeps for backward, followed apart from a step.

The call runs between two functions of autograd that make its arguments and its gradients, so that nothing but its own
graph refers to them. It runs on meta tensors, on which operations are several times as fast as on fake ones.
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
from memopt.torch_compat import (
    current_node,
    run_backward,
    sequence_number,
    storage_id,
    tree_leaves,
    unset_fake_temporarily,
)
from memopt.trace.operations import Operation
from memopt.trace.storages import Lifetime, meta_counted
from memopt.trace.timeline import Timeline

#: What a call returns, of the tensors among its arguments.
Run = Callable[[Iterable[Tensor]], Any]


@dataclass(frozen=True)
class _Form:
    """A tensor, as a part of one of several storages."""

    storage: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class Forms:
    """Tensors and their storages."""

    each: tuple[_Form, ...]
    sizes: tuple[int, ...]
    """Bytes of the storages."""

    def on(self, bases: Sequence[Tensor]) -> list[Tensor]:
        """Tensors of these forms on storages of the tensors `bases`."""
        return [bases[form.storage].as_strided(form.size, form.stride, form.offset) for form in self.each]

    def constants(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Those of `tensors`, which have these forms, that have no gradient."""
        return [tensor for tensor, form in zip(tensors, self.each, strict=True) if not form.requires_grad]

    def bases(self, device: str = "cpu") -> list[Tensor]:
        """A tensor of every storage."""
        dtypes = {form.storage: form.dtype for form in self.each}
        return [
            torch.empty(size // dtypes[at].itemsize, dtype=dtypes[at], device=device)
            for at, size in enumerate(self.sizes)
        ]


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
    """What alike calls have in common."""

    arguments: Forms
    others: Hashable
    """The function, its other arguments, and what else decides what it does."""
    parameters: tuple[bool, ...]
    """Of the storages of its arguments, whether parameters lie there."""
    graph: bool
    """Whether it can be differentiated."""
    hooks: Literal["", "dropping", "keeping"] = ""
    """Whether hooks of checkpointing drop what it saves, or keep that as autograd does, because it runs again."""


@dataclass
class Followed:
    """What a call did in its forward, and in the backward for some of its gradients."""

    returned: Any
    """With a slot for each tensor."""
    outputs: Forms
    gradients: Forms
    has_gradient: list[bool]
    """Of each tensor among the arguments."""
    forward: list[tuple[bool, Lifetime]]
    """Allocations (True) and frees."""
    backward: list[tuple[bool, Lifetime]]
    computed: tuple[list[Operation], list[Operation]]
    lives: tuple[list[Lifetime], ...]
    """Of the storages of arguments, outputs, the gradients that were given and those that were returned."""
    node: float
    """In whose backward it was called; -1 in none."""


class Ends:
    """What lies around a call that is followed: makes its arguments and the gradients that it is given."""

    def __init__(self, timeline: Timeline, call: Call, wanted: tuple[bool, ...] | None) -> None:
        self.timeline, self.call, self.wanted = timeline, call, wanted
        self.lives: list[list[Lifetime]] = []
        self.marks: list[Mark] = []
        self.outputs = self.gradients = Forms((), ())
        self.has_gradient = [False] * len(call.arguments.each)

    def followed(self, run: Run) -> Followed | None:
        timeline, node = self.timeline, current_node()
        with (
            timeline.apart(), unset_fake_temporarily(), meta_counted(), torch.set_grad_enabled(self.call.graph),
            self._hooks(),
        ):  # fmt: skip
            root = torch.zeros((), device="meta", requires_grad=self.call.graph)
            tensors = _Arguments.apply(self, root)  # type: ignore[no-untyped-call]
            self.mark()
            returned = run(tensors)
            self.mark()
            outputs = [each for each in tree_leaves(returned) if isinstance(each, Tensor)]
            returned = without_tensors(returned)
            self.outputs = self.know(outputs)
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
            return None  # nothing that goes in has a gradient
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
        """In the place of those that are active around the call."""
        if not self.call.hooks:
            return nullcontext()
        drops = self.call.hooks == "dropping"
        # Checkpointing hands out once what it computed again.
        return saved_tensors_hooks(lambda saved: None if drops else [saved.detach()], lambda held: held.pop())

    def mark(self) -> None:
        self.marks.append(self.timeline.mark())

    def know(self, tensors: Iterable[Tensor]) -> Forms:
        forms, storages = forms_of(tensors)
        self.lives.append([life for each in storages if (life := self.timeline.life(each)) is not None])
        return forms

    def make(self) -> list[Tensor]:
        bases = self.call.arguments.bases("meta")
        self.timeline.take_for_parameters(base for base, yes in zip(bases, self.call.parameters, strict=True) if yes)
        made = self.call.arguments.on(bases)
        self.know(made)
        return made

    def give(self) -> list[Tensor | None]:
        wanted = self.wanted or tuple(form.requires_grad for form in self.outputs.each)
        made = [
            torch.empty_strided(form.size, form.stride, dtype=form.dtype, device="meta") if yes else None
            for form, yes in zip(self.outputs.each, wanted, strict=True)
        ]
        self.know(each for each in made if each is not None)
        self.mark()
        return made

    def end(self, gradients: Sequence[Tensor | None]) -> None:
        self.mark()
        self.has_gradient = [each is not None for each in gradients]
        self.gradients = self.know(each for each in gradients if each is not None)


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
    """Takes what a call returned, and makes its gradients."""

    @staticmethod
    def forward(ctx: Any, ends: Ends, *outputs: Tensor) -> Tensor:
        ctx.ends = ends
        return torch.zeros((), device="meta")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.ends.give()
