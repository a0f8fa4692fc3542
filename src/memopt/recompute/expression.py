"""What a tensor is computed again from: a first value, of tensors that are saved anyway, and the steps since."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memopt.recompute.rules import Node, Rule


class Beside(NamedTuple):
    """Stands for a tensor that a step reads beside the value: which one of `Expression.reads`."""

    place: int


#: Stands for the value of the step before.
VALUE = Beside(-1)
#: (function, its arguments, pairs of a keyword and its argument), with `VALUE`, :class:`Beside` or :class:`Other` in
#: the place of tensors. Hashable where it reads nothing beside the value; equal steps give the same result.
Step = tuple[Callable[..., Tensor], tuple[Any, ...], tuple[tuple[str, Any], ...]]


def step(function: Callable[..., Tensor], *args: Any) -> Step:
    """The step that calls ``function(value, *args)``."""
    return function, (VALUE, *args), ()


def cast_to(dtype: torch.dtype) -> Step:
    """The step that converts the value to `dtype`."""
    return Tensor.to, (VALUE, dtype), ()


class Branch(NamedTuple):
    """Stands for the value after more steps: an operation reads two tensors that were made of the same one."""

    steps: tuple[Step, ...]


class Other(NamedTuple):
    """Stands for a tensor with an expression of its own, in a step that reads it beside the value."""

    expression: Expression
    first_read: int
    """Its reads stand together among those of the expression that has the step, from this one on."""


class Read(NamedTuple):
    """A tensor that a step has read beside the value."""

    tensor: Tensor
    """Without a graph."""
    version: int
    made_here: bool
    """In the forward that is followed, for all that is known; what was made before is shared with other layers."""
    is_saved: bool = False
    """By the operation that read it, for its own backward: keeping it takes no more memory."""


class Expression(NamedTuple):
    """How a tensor is computed again, while backward has not been through `node`."""

    node: Node
    """Its saved tensors are the inputs; None where no rule speaks of the node that made the tensor."""
    rule: Rule | None
    """Gives the first value."""
    steps: tuple[Step, ...] = ()
    """What was done to the first value since, in order."""
    reads: tuple[Read, ...] = ()
    """What the steps read beside the value."""
    to_prove: tuple[Any, ...] = ()
    """The functions of all steps where it has to be seen that they give the tensor (`memopt.recompute.graph`)."""

    def then(self, one: Step) -> Expression:
        """This expression and one step more."""
        return self._replace(steps=(*self.steps, one))

    def value(self, read: Sequence[Tensor] = ()) -> Tensor:
        """The tensor; `read` are the tensors of `reads`, which need not be there."""
        return after(self.first(), self.steps, read)

    def first(self) -> Tensor:
        """The output of `node`."""
        assert self.rule is not None
        return self.rule.recompute(self.node)


def after(value: Tensor, steps: Iterable[Step], read: Sequence[Tensor] = ()) -> Tensor:
    """`value` after these steps; where a copy lies in memory is the caller's affair."""

    for function, args, named in steps:
        value = function(
            *_filled(args, value, read), **{name: _filled(argument, value, read) for name, argument in named}
        )
    return value


# Not inside of `after`: a function that calls itself is a cycle, which would hold the value.
def _filled(each: Any, value: Tensor, read: Sequence[Tensor]) -> Any:
    if type(each) is Beside:
        return value if each is VALUE else read[each.place]
    if type(each) is Branch:
        return after(value, each.steps, read)
    if type(each) is Other:
        return each.expression.value(read[each.first_read :])
    return tuple([_filled(part, value, read) for part in each]) if type(each) is tuple else each
