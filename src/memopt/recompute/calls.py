"""Records expressions from the functions that a module's forward calls: products and their sums, through elementwise
operations, gathers and views.

The graph lacks tensors that recomputing needs: it has no trace of an added mask. The product's node has saved both
factors, so the only tensors to keep are those that operations read beside the scores (a mask, a bias).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from memopt.recompute.expression import VALUE, Beside, Expression, Other, Read, cast_to, step
from memopt.recompute.operations import at_hand
from memopt.recompute.rules import PROBABILITIES, Node, Rule, rule_of
from memopt.recompute.versions import Noted
from memopt.torch_compat import PLAIN_TYPES, held, saved, shows_saved, storage_id

_BMM = "BmmBackward0" if shows_saved("BmmBackward0") else None
_VIEWS = frozenset(
    f"{name}Backward0" for name in ("UnsafeView", "View", "ReshapeAlias", "Permute", "Transpose")
)  # einsum permutes dimensions of size 1
_PRODUCT = Rule(lambda node: torch.bmm(saved(node, "self"), saved(node, "mat2")), lambda node: True, PROBABILITIES)
#: The rule of a product that reads both factors as `Read`: its step ignores the first value.
_READ = Rule(lambda node: torch.empty(0), lambda node: True, PROBABILITIES)
#: Most products in one expression: each sum of a tensor and itself would double their number.
MOST_PRODUCTS = 4

PRODUCTS = frozenset({torch.matmul, torch.bmm, torch.einsum, Tensor.matmul, Tensor.__matmul__, Tensor.bmm})
_ELEMENTWISE = ("add", "sub", "mul", "div", "masked_fill", "where", "clamp", "maximum", "minimum", "tanh")
_LAID_OUT = ("view", "reshape", "unsqueeze", "squeeze", "transpose", "permute", "flatten", "contiguous", "cat")
GATHERS = frozenset({torch.gather, Tensor.gather})
_OPERATORS = {"__add__": "add", "__radd__": "add", "__sub__": "sub", "__mul__": "mul", "__rmul__": "mul"}
_WRITTEN = {"__iadd__": "add", "__isub__": "sub", "__imul__": "mul", "__itruediv__": "div"}
_IN_PLACE = {f"{name}_": name for name in ("add", "sub", "mul", "div", "masked_fill", "clamp")}
_SAVED = ("gather", "masked_fill", "mul", "div")
_CASTS = ("to", "float", "half", "bfloat16", "double", "type", "type_as")


def _steps(meant: Mapping[str, str]) -> dict[Any, Callable[..., Tensor]]:
    # `torch.where` and `Tensor.where` have their arguments in different orders.
    owners = [(owner, name) for owner in (Tensor, torch) for name in meant if hasattr(owner, name)]
    return {getattr(owner, name): getattr(owner, meant[name]) for owner, name in owners}


#: Operations whose node saves the tensors that they read beside a tensor with a gradient.
_SAVING = frozenset(getattr(owner, name) for owner in (Tensor, torch) for name in _SAVED if hasattr(owner, name))
#: Operations that are followed -> the function that computes their result into a new tensor.
STEPS: dict[Any, Callable[..., Tensor]] = {
    **_steps({name: name for name in (*_ELEMENTWISE, *_LAID_OUT, "gather")}),
    **_steps({"__truediv__": "div", **_OPERATORS, **_WRITTEN, **_IN_PLACE}),
    **{getattr(Tensor, name): Tensor.to for name in _CASTS},
}


class Followed(Noted[Expression]):
    """The tensors of one forward that can be recomputed, with their expressions."""

    def __init__(self, given: Iterable[Any]) -> None:
        """`given` are the arguments of the forward."""
        super().__init__()
        self._given = {storage_id(each.untyped_storage()) for each in given if type(each) in PLAIN_TYPES}

    @property
    def is_empty(self) -> bool:
        return not self._known

    def among(self, args: Sequence[Any]) -> tuple[Expression, Tensor] | None:
        """The first of these arguments that is followed, behind its expression."""
        for each in args:
            if type(each) in (list, tuple):
                found = self.among(each)
                if found is not None:
                    return found
            elif (expression := self.of(each)) is not None:
                return expression, each
        return None

    def product(self, function: Any, args: Sequence[Any], output: Any) -> None:
        """Record that `function`, one of `PRODUCTS`, returned `output` for `args`."""
        # If `output` is contiguous, the views after the product have kept the order of its elements.
        if type(output) not in PLAIN_TYPES or not output.is_contiguous() or output.storage_offset():
            return
        node: Node = output.grad_fn
        while node is not None and node.name() in _VIEWS:
            node = node.next_functions[0][0]
        if node is None or node.name() != _BMM:
            return
        # The node has saved both factors if both need a gradient; otherwise only the factor without one.
        if all(edge is not None for edge, _ in node.next_functions):
            self.note(output, Expression(node, _PRODUCT, (step(Tensor.view, output.shape),)))
        elif function is not torch.einsum and len(args) == 2 and all(_is_read_as_it_is(each, output) for each in args):
            held_by_node = [at_hand(held(node, name)) for name in ("self", "mat2")]
            saved_ids = {storage_id(each.untyped_storage()) for each in held_by_node if each is not None}
            storages = [storage_id(each.untyped_storage()) for each in args]
            reads = [self._read(each, is_saved=at in saved_ids) for each, at in zip(args, storages, strict=True)]
            if 2 * _bytes(reads) <= output.nbytes:
                self.note(output, Expression(node, _READ, ((function, (Beside(0), Beside(1)), ()),), tuple(reads)))

    def made_by_a_rule(self, output: Tensor) -> None:
        """Record the output of a node that has a rule; the backwards of all its readers run before the node's."""
        self.note(output, Expression(output.grad_fn, rule_of(output.grad_fn)))

    def step(
        self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], before: Expression, x: Tensor, output: Any
    ) -> None:
        """Record that `function`, one of `STEPS`, made `output` from `x`, with the expression `before`, and others."""
        if type(output) is not type(x) or output.device != x.device:
            return
        if output is not x and any(output is each for each in args):  # written into: its old value is gone
            return
        reads = list(before.reads)
        steps = [*before.steps, cast_to(output.dtype)]
        if STEPS[function] is not Tensor.to:
            places, placed = {id(x): VALUE}, functools.partial(self._placed, saves=STEPS[function] in _SAVING)
            named = tuple((name, placed(each, places, reads)) for name, each in kwargs.items())
            steps[-1:] = [(STEPS[function], placed(args, places, reads), named)]
            if output is x:  # written in place: `x` keeps its dtype
                steps.append(cast_to(output.dtype))
        elif output is x:
            return
        if _products(steps) > MOST_PRODUCTS:
            return
        # Tensors made here, if as large as the scores, would live longer and free nothing.
        here = 2 * _bytes([each for each in reads if each.made_here])
        if here <= output.nbytes and all(type(each.tensor) in PLAIN_TYPES for each in reads):
            self.note(output, Expression(before.node, before.rule, tuple(steps), tuple(reads)))

    def _placed(self, each: Any, places: dict[int, Beside], reads: list[Read], saves: bool) -> Any:
        """The argument of a step that stands for `each`; tensors without a place are appended to `reads`."""
        if type(each) in (list, tuple):
            return tuple([self._placed(part, places, reads, saves) for part in each])
        if isinstance(each, Tensor) and id(each) not in places:
            if (other := self.of(each)) is not None:
                reads += other.reads
                return Other(other, len(reads) - len(other.reads))
            places[id(each)] = Beside(len(reads))
            reads.append(self._read(each, is_saved=saves))
        return places.get(id(each), each)

    def _read(self, other: Tensor, *, is_saved: bool) -> Read:
        base = other if other._base is None else other._base
        # Copy a parameter: sharded training may free it before backward.
        is_parameter = base.grad_fn is None and base.requires_grad
        tensor = other.detach().clone() if is_parameter else other.detach()
        made_here = storage_id(tensor.untyped_storage()) not in self._given
        # A tensor with a grad_fn may be saved as a handle: do not count on its being kept.
        return Read(tensor, tensor._version, made_here, is_saved and base.grad_fn is None and not is_parameter)


def _is_read_as_it_is(factor: Any, output: Tensor) -> bool:
    """Whether the product reads this factor itself, not a cast of it; false for a parameter, which may be sharded."""
    if type(factor) not in PLAIN_TYPES or isinstance(factor if factor._base is None else factor._base, nn.Parameter):
        return False
    return bool(factor.dim() > 2 and factor.dtype == output.dtype)


def _products(steps: Iterable[Any]) -> int:
    """The number of products that an expression with these steps computes."""
    parts = [part for _, args, named in steps for part in (*args, *dict(named).values())]
    others = [each for part in parts for each in (part if type(part) is tuple else (part,))]
    return 1 + sum(_products(each.expression.steps) for each in others if type(each) is Other)


def costs_less_than(nbytes: int, reads: Sequence[Read]) -> bool:
    """Whether keeping the tensors `reads` takes at most `nbytes`, the bytes that it frees, and none has changed. A
    tensor that other layers read as well is kept once for all. If no layer shares one, no more is kept than before."""
    unchanged = all(each.tensor._version == each.version for each in reads)
    return unchanged and _bytes(reads) <= nbytes


def _bytes(reads: Sequence[Read]) -> int:
    """Bytes of the storages of `reads`, without the storages that are saved anyway."""
    storages = {storage_id(storage := each.tensor.untyped_storage()): storage.nbytes() for each in reads}
    for each in reads:
        if each.is_saved:
            storages.pop(storage_id(each.tensor.untyped_storage()), None)
    return sum(storages.values())
