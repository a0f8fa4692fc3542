"""Expressions, which recompute a tensor: a first value from tensors that are saved anyway, and the steps since."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memopt.recompute.rules import Node, Rule


class Beside(NamedTuple):
    """Stands for a tensor that a step reads beside the value: its index in `Expression.reads`."""

    place: int


#: Stands for the result of the previous step.
VALUE = Beside(-1)
#: (function, its arguments, pairs of a keyword and its argument), with `VALUE`, :class:`Beside` or :class:`Other` in
#: the place of tensors. Hashable if it reads no tensor beside the value; equal steps have equal results.
Step = tuple[Callable[..., Tensor], tuple[Any, ...], tuple[tuple[str, Any], ...]]


def step(function: Callable[..., Tensor], *args: Any) -> Step:
    """The step that calls ``function(value, *args)``."""
    return function, (VALUE, *args), ()


def cast_to(dtype: torch.dtype) -> Step:
    """The step that converts the value to `dtype`."""
    return Tensor.to, (VALUE, dtype), ()


class Branch(NamedTuple):
    """Stands for the value after more steps, in a step that reads several tensors made from the same value."""

    steps: tuple[Step, ...]


class Other(NamedTuple):
    """Stands for a tensor with an expression of its own, in a step that reads it beside the value."""

    expression: Expression
    first_read: int
    """Index of the first of its reads, which are consecutive in the reads of the expression that has the step."""


class Read(NamedTuple):
    """A tensor that a step has read beside the value."""

    tensor: Tensor
    """The tensor, detached."""
    version: int
    made_here: bool
    """False if it was an argument of the followed forward: other layers may share it. True otherwise."""
    is_saved: bool = False
    """Whether the operation that read it saves it for its own backward: keeping it takes no more memory."""


class Expression(NamedTuple):
    """How to recompute a tensor, until backward has freed the saved tensors of `node`."""

    node: Node
    """The node of the first value, whose saved tensors are the inputs; None if it is not known."""
    rule: Rule | None
    """Computes the first value; None if `node` has no rule."""
    steps: tuple[Step, ...] = ()
    """The steps from the first value to the tensor, in order."""
    reads: tuple[Read, ...] = ()
    """Tensors that the steps read beside the value."""
    to_prove: tuple[Any, ...] = ()
    """The functions of all steps, if their result must be compared with the tensor first (`memopt.recompute.graph`)."""

    def then(self, one: Step) -> Expression:
        """This expression with one more step."""
        return self._replace(steps=(*self.steps, one))

    def value(self, read: Sequence[Tensor] = ()) -> Tensor:
        """The recomputed tensor; `read` are the tensors of `reads` (the expression may be without `reads`)."""
        return after(self.first(), self.steps, read)

    def first(self) -> Tensor:
        """The output of `node`. Raises a RuntimeError if an earlier backward has freed what `node` saved."""
        assert self.rule is not None
        try:
            return self.rule.recompute(self.node)
        except RuntimeError as error:
            if "backward through the graph a second time" not in str(error):
                raise
            raise RuntimeError(
                f"Backward needs the output of {self.node.name()} and computes it from what that operation saved, but "
                "an earlier backward has freed that (trying to backward through the graph a second time). Pass "
                "retain_graph=True to the earlier backward. If you do not call it yourself (zero-bubble schedules of "
                "pipelines), call memopt.unpatch(model) before training."
            ) from error


def after(value: Tensor, steps: Iterable[Step], read: Sequence[Tensor] = ()) -> Tensor:
    """`value` after these steps. A copy may be an alias or have other strides: the caller checks that."""

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
