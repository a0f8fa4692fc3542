"""Records expressions from the autograd graph: the steps from the output of a node with a rule to a tensor.

It follows the operations of `memopt.recompute.steps`, and dropouts that can be repeated. It follows an operation of
several tensors if all of them were made from one tensor, as in rotary embeddings of a norm's output.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from memopt.recompute.expression import Branch, Expression, Step, step
from memopt.recompute.operations import signed
from memopt.recompute.rules import ELEMENTWISE, MASKED, NORMALISED, PRODUCT, Node, Rule, rule_of
from memopt.recompute.steps import (
    CAT,
    CLONE,
    CLONED,
    CONSTANT_PAD,
    COPIES,
    FILL_KEY,
    JOINS,
    PARTS,
    PLAIN,
    REPEAT,
    SCALES,
    SPLITS,
    STEP_OF,
    SUMS,
    VIEWS,
    Padding,
    all_steps,
    dropped_out,
    padded,
    rows,
    scale_of,
    scaled,
)  # fmt: skip
from memopt.recompute.versions import is_unchanged, was_changed
from memopt.torch_compat import input_metadata, saved, shows_saved

#: Functions of ZeRO-3 that return their input (deepspeed/runtime/zero/parameter_offload.py), a class for each module.
_SAME = frozenset({"PreBackwardFunctionForModuleBackward", "PostBackwardFunctionModuleBackward"})
#: Most nodes to visit on one path back from a tensor, and on all paths. A rotation takes about 8, and 20.
_LONGEST, _MOST = 24, 80
_EXPRESSION_KEY = "memopt.expression"
_STOP, _STEP, _SUM, _SCALE = range(4)
_kind_of_type: dict[type, int] = {}


def _kind(node: Node) -> int:
    kind = _kind_of_type.get(type(node))
    if kind is None:
        name = node.name()
        if name in STEP_OF or name in SPLITS or name in MASKED or name in _SAME or name == CONSTANT_PAD:
            kind = _STEP
        else:
            kind = _SUM if name in SUMS else _SCALE if name in SCALES else _STEP if name in JOINS else _STOP
        if type(node).__name__ == name and name not in _SAME:  # a type of _SAME would keep its module alive
            _kind_of_type[type(node)] = kind
    return kind


def may_have_rule(node: Node) -> bool:
    """Whether `expression_of` may find a node with a rule: a quick test along one path, without recording steps."""
    for _ in range(_LONGEST):
        if node is None:
            return False
        kind = _kind_of_type.get(type(node))
        if kind is None:
            kind = _kind(node)
        if kind == _STOP:
            return rule_of(node) is not None
        edges = node.next_functions
        first, last = edges[0][0], edges[-1][0]
        if kind == _SCALE and first is not None and last is not None:
            return rule_of(node) is not None
        # A residual stream is a sum too, but one of its terms is not the output of a step.
        if kind == _SUM and (first is None or last is None or _STOP in (_kind(first), _kind(last))):
            return False
        node = first or last
    return False


def expression_of(node: Node) -> Expression:
    """The expression of the output of `node`: the first node that is not followed, and the steps from its output.

    Typical steps: casts (autocast, adapters), copies of attention's output in another layout for the next linear,
    padded copies for convolutions, dropouts of adapters, rotations of queries and keys. The rule is None if the first
    node has none.
    """
    expression: Expression | None = node.metadata.get(_EXPRESSION_KEY)
    if expression is None:
        first, steps = _back((node, 0), [_MOST]) or (None, ())
        done = tuple([function for function, _, _ in all_steps(steps)])
        to_prove = () if PLAIN.issuperset(done) else done
        expression = Expression(first, None if first is None else rule_of(first), steps, (), to_prove)
        if first is not node and not _has(node, steps):  # else the node would own itself and never be freed
            node.metadata[_EXPRESSION_KEY] = expression
    return expression


def _has(node: Node, values: Iterable[Any]) -> bool:
    """Whether `node` is in `values` or their nested tuples: a step may hold its node to read a saved tensor."""
    return any(each is node or (isinstance(each, tuple) and _has(node, each)) for each in values)


_Edge = tuple[Node, int]
_Found = tuple[Node, tuple[Step, ...]]
"""The first node on the path back that has no step, and the steps from its output."""


def _back(edge: _Edge, left: list[int]) -> _Found | None:
    """Follow a tensor back over at most `left` nodes; None if its origin is not found."""
    steps: list[Step] = []
    while True:
        node, output = edge
        left[0] -= 1
        if node is None or left[0] < 0:
            return None
        name, next_ = node.name(), 0
        if name in SPLITS:
            steps.append(SPLITS[name](node, output))
        elif output:  # rules compute first outputs only
            return None
        elif name in STEP_OF:
            steps.append(STEP_OF[name](node))
        elif name == CAT and _is_of_one(node):
            steps.append(CLONED)
            next_ = -1
        elif name in JOINS:
            joined = _joined(node, left)
            return joined and (joined[0], (*joined[1], *reversed(steps)))
        elif name in SCALES and (found := scale_of(node)) is not None:
            next_ = found[0]
            steps.append(found[1])
        elif name == CONSTANT_PAD and shows_saved(name) and not steps:  # the constant is read from the tensor itself
            # One object for all tensors that are made from the node's output.
            padding = Padding(tuple(map(signed, saved(node, "pad"))))
            steps.append(step(padded, node.metadata.setdefault(FILL_KEY, padding)))
        elif name in MASKED and getattr(node, "read_unchanged", False):
            steps.append(step(dropped_out, node.mask))
        elif name not in _SAME:
            return node, tuple(reversed(steps))
        edge = node.next_functions[next_]


def _joined(node: Node, left: list[int]) -> _Found | None:
    """Follow all inputs of `node` back to one tensor; steps that all paths begin with are shared."""
    first: Node = None
    ways: list[tuple[Step, ...]] = []
    for edge in node.next_functions:
        found = _back(edge, left)
        if found is None or (first is not None and found[0] is not first):
            return None
        first = found[0]
        ways.append(found[1])
    shared = 0
    while all(len(way) > shared and way[shared] == ways[0][shared] for way in ways):
        shared += 1
    branches = tuple(Branch(way[shared:]) for way in ways)
    return first, (*ways[0][:shared], JOINS[node.name()](node, branches))


def may_be_repeated(expression: Expression, rule: Rule, *, of_casts_only: bool = False) -> bool:
    """Whether the steps after the output of a node with `rule` may be repeated; with `of_casts_only`, only casts may.

    A tensor may be changed in place, unseen by autograd, between its making and a copy of it. If the node saves the
    tensor, unpacking it then raises an error; if the node has a witness, that detects the change. Nothing detects a
    change between two copies, but a cast follows its input at once (autocast, adapters), and a seeded dropout checks
    the version of its input. With other steps (`to_prove`) the result must also be compared with the tensor.
    """
    done: Sequence[Any] = expression.to_prove
    if done:
        elementwise = rule.family in (NORMALISED, ELEMENTWISE, PRODUCT)
        return elementwise and not was_changed(expression.node) and dropped_out not in done and padded not in done
    done = [function for function, _, _ in expression.steps]
    if of_casts_only and not _only_casts(done):
        return False
    if dropped_out in done:
        first = done.index(dropped_out)
        if not all(each in (Tensor.to, dropped_out) for each in done[first:]):
            return False
        done = done[:first]
        if rule.of_copies_only:
            return _copies(done) <= 1
    elif rule.of_copies_only:
        return _copies(done) == 1 or (not _copies(done) and Tensor.to in done)
    if _only_casts(done):
        return True
    is_cast = all(each in (Tensor.to, Tensor.reshape) for each in done)  # casts of views, as in fp32 routers of experts
    is_one_copy = is_cast or _is_cast_part(done) or (_copies(done) == 1 and Tensor.to not in done)
    return is_one_copy and is_unchanged(expression.node)


def nodes_read(expression: Expression) -> Iterator[tuple[Node, str | None]]:
    """The nodes whose saved tensors `expression` reads, each with the field that it reads (None: any field)."""
    yield expression.node, None
    for function, args, _ in all_steps(expression.steps):
        if function is rows:
            yield args[-1], None
        elif function is scaled:
            yield args[1], args[2]


def repeated_from(node: Node) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(shape with the repeats, shape without) if the output of `node` is a copy of a smaller tensor that was expanded
    or repeated, in the order of its elements; None for other nodes. Examples: grouped keys and values, and position
    keys that are repeated for each row of a batch."""
    while node is not None and node.name() in VIEWS:
        node = node.next_functions[0][0]
    if node is not None and node.name() == REPEAT and input_metadata is not None and shows_saved(REPEAT):
        sides = list(zip(saved(node, "repeats"), input_metadata(node)[0].shape, strict=True))
        shape = tuple(n for repeats, size in sides for n in (repeats, size // max(repeats, 1)))
        return shape, tuple(1 if i % 2 == 0 else n for i, n in enumerate(shape))
    if node is None or node.name() != CLONE or input_metadata is None:
        return None
    shape, (expanded, _) = tuple(input_metadata(node)[0].shape), node.next_functions[0]
    if expanded is None or expanded.name() != "ExpandBackward0" or not shows_saved("ExpandBackward0"):
        return None
    once = tuple(saved(expanded, "self_sym_sizes"))
    return shape, (1,) * (len(shape) - len(once)) + once


def reads_parts(steps: Sequence[Step]) -> bool:
    """Whether a step reads a part of the tensor, as experts do, which share the whole tensor."""
    return any(function in PARTS for function, _, _ in steps)


def _only_casts(done: Sequence[Any]) -> bool:
    return all(each is Tensor.to for each in done)


def _copies(done: Sequence[Any]) -> int:
    return sum(each in COPIES for each in done)


def _is_cast_part(done: Sequence[Any]) -> bool:
    """Whether a part of the output, or of a view of it, was read and then at most cast."""
    last = max((i for i, each in enumerate(done) if each in PARTS), default=None)
    if last is None or not _only_casts(done[last + 1 :]):
        return False
    return _copies(done) <= 1 and Tensor.to not in done[:last]


def _is_of_one(node: Node) -> bool:
    """Whether a concatenation copies only its last tensor, since the others are empty (a cache in its first use)."""
    last, output = node.next_functions[-1]
    if input_metadata is None or last is None:
        return False
    return bool(input_metadata(node)[0].shape == input_metadata(last)[output].shape)
