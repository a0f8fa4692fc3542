"""Tests whether a function is pure, so that backward may call it again instead of saving the tensors inside it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from memopt.recompute.versions import versions_of
from memopt.torch_compat import (
    TorchDispatchMode,
    no_modes,
    no_torch_function,
    storage_id,
    tree_leaves,
    tree_map,
    without_foreign_hooks,
)

_COMPARED = (bool, float, str, type(None), Enum, torch.dtype, torch.device, torch.layout)
_PLAIN = (*_COMPARED, int)
_SINGLE = (Tensor, *_PLAIN)


class NotPureError(Exception):
    """The reason why a function cannot be called again."""


def form_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
    """A key of a call's arguments: equal for calls that run the same code of a function, whatever the tensors' sizes.
    Raises a NotPureError if an argument is an object that may hold anything."""
    return _form(tuple(args)), tuple((name, _form(value)) for name, value in kwargs.items())


def _form(value: Any) -> Hashable:
    if type(value) in (tuple, list, torch.Size):
        return tuple([_form(each) for each in value])
    if isinstance(value, Tensor):
        return Tensor, value.dim(), value.dtype, value.requires_grad
    if isinstance(value, _PLAIN):
        # No values of ints: they are lengths, which differ from batch to batch. A probability of 0 may run other code.
        kind: type = type(value)
        return (kind, value) if isinstance(value, _COMPARED) else kind
    raise NotPureError(f"it takes a {type(value).__name__}")


def is_compound(value: Any) -> bool:
    """Whether an argument may hold tensors, or be changed by a forward: a container or an object, also in a tuple."""
    if isinstance(value, tuple):
        return any(isinstance(each, Tensor) or is_compound(each) for each in value)
    return not isinstance(value, _SINGLE)


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The table of attributes of an object among the arguments of a forward, which may hold tensors or other state.
    None for tensors, modules, classes and functions."""
    is_other = isinstance(value, (Tensor, nn.Module, type)) or callable(value)
    return None if is_other else getattr(value, "__dict__", None)


def differentiable(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bool, ...]:
    """For each tensor that ``function(*args, **kwargs)`` returns (`tree_leaves`), whether it requires a gradient.
    Raises a NotPureError if a call on meta tensors fails, draws random numbers, changes an argument, reads a trained
    tensor that is none (which would get no gradient) or returns tensors that are not new. Changes of other state
    (globals, closures) are not detected."""
    with no_modes(), no_torch_function(), without_foreign_hooks():
        copies: dict[int, Tensor] = {}
        given, named = on_meta(tuple(args), copies), {name: on_meta(value, copies) for name, value in kwargs.items()}
        versions = versions_of([*copies.values()])
        try:
            with torch.enable_grad(), RandomDraws() as random:
                returned = tree_leaves(function(*given, **named))
        except Exception as error:
            raise NotPureError(f"it does not run without values ({type(error).__name__})") from error
        if random.found or versions != versions_of([*copies.values()]):
            raise NotPureError("it draws random numbers or changes its arguments")
        if _reads_trained(returned):
            raise NotPureError("it reads a trained tensor that is no argument")
        return tuple(_of_new(returned, copies))


def _reads_trained(returned: Sequence[Any]) -> bool:
    """Whether the graph of `returned` has a leaf with values, where all arguments were on meta."""
    left, seen = [each.grad_fn for each in returned if isinstance(each, Tensor)], {None}
    while left:
        node: Any = left.pop()
        if node not in seen:
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if leaf is not None and not leaf.is_meta:
                return True
            left += [each for each, _ in node.next_functions]
    return False


def _of_new(returned: Sequence[Any], given: Mapping[int, Tensor]) -> list[bool]:
    tensors = [each for each in returned if isinstance(each, Tensor)]
    storages = {storage_id(each.untyped_storage()) for each in (*tensors, *given.values())}
    if len(storages) < len(tensors) + len({storage_id(each.untyped_storage()) for each in given.values()}):
        raise NotPureError("it returns what it was given")
    if not all(isinstance(each, (Tensor, *_PLAIN)) for each in returned):
        raise NotPureError("it returns other objects than tensors")
    return [each.requires_grad for each in tensors]


_SLOT = object()


def without_tensors(values: Any) -> Any:
    """`values` (tuples, lists, dicts) with a slot in the place of each tensor, in the order of `tree_leaves`."""
    return tree_map(lambda value: _SLOT if isinstance(value, Tensor) else value, values)


def with_tensors(template: Any, tensors: Iterable[Tensor]) -> Any:
    """`template` of :func:`without_tensors` with these tensors in its slots."""
    each = iter(tensors)
    return tree_map(lambda value: next(each) if value is _SLOT else value, template)


def call_on(function: Callable[..., Any], template: Any, tensors: Iterable[Tensor]) -> Any:
    """`function`, called with the arguments ``(args, kwargs)`` whose :func:`without_tensors` is `template`."""
    args, kwargs = with_tensors(template, tensors)
    return function(*args, **kwargs)


def on_meta(value: Any, copies: dict[int, Tensor]) -> Any:
    """`value` with a meta tensor in the place of each tensor; `copies` holds them by the id of the original."""
    if type(value) in (tuple, list):
        return type(value)([on_meta(each, copies) for each in value])
    if not isinstance(value, Tensor):
        return torch.device("meta") if isinstance(value, torch.device) else value
    if id(value) not in copies:
        like = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
        copies[id(value)] = like.requires_grad_() * 1 if value.requires_grad else like
    return copies[id(value)]


class RandomDraws(TorchDispatchMode):
    """Sets `found` if an operation inside draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found = self.found or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))
