"""Operations on uncomputed logits that leave them uncomputed.

Recorded, to run on each row: elementwise functions (with numbers, tensors of one element or of one element a column),
casts, softmax. Applied to the head's input instead, in the graph: views, slices and selections of leading dimensions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from numbers import Number
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt.environment.partitioned import is_partitioned
from memopt.kernels.base.autograd import autocast_as, autocast_dtype
from memopt.patches.loss.kept import wait
from memopt.patches.loss.lazy import HANDLERS, LazyLogits, stand_for
from memopt.patches.loss.memory import empty
from memopt.patches.loss.source import Operation, Source, versions_of
from memopt.recompute.expression import VALUE, Beside, Step, step
from memopt.torch_compat import PLAIN_TYPES, no_dispatch, no_torch_function

_ELEMENTWISE = """add __radd__ sub subtract rsub __rsub__ mul multiply __rmul__ div divide true_divide __rdiv__
    __rtruediv__ neg negative tanh sigmoid exp log pow square clamp clip clamp_min clamp_max"""
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)
_OWNERS = (Tensor, torch, F, torch.special)


def handles(names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register ``answer(function, name, *args, **kwargs)`` for every function of PyTorch with one of these names."""

    def register(answer: Callable[..., Any]) -> Callable[..., Any]:
        for name in names.split():
            for owner in _OWNERS:
                function = getattr(owner, name, None)
                if callable(function):  # torch.float is a dtype
                    HANDLERS[function] = functools.partial(answer, function, name)
        return answer

    return register


def recorded(logits: LazyLogits, operation: Operation, dtype: torch.dtype, form: Tensor | None = None) -> Any:
    """`logits` after one more operation."""
    source = logits.source
    then = dataclasses.replace(_untracked(source), operations=(*source.operations, operation), dtype=dtype)
    return stand_for(then, logits, operation.run, form)


def moved(logits: LazyLogits, x: Tensor, step: Callable[[Tensor], Tensor], form: Tensor | None) -> Any:
    """Logits of the rows `x` of the head's input; `step` makes their values from those of `logits`, with the `form`."""
    source = _untracked(logits.source)
    return stand_for(
        dataclasses.replace(
            source,
            x=x if source.tracked else x.detach(),
            versions=versions_of((x,)),
            rows=source.rows if x is logits.source.x else object(),
        ),
        logits,
        step,
        form,
    )


def _formed(function: Callable[..., Any], logits: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    """The form of the stock function's result, computed from the form of `logits`: a view of it, or a copy."""
    others = [leaf.form if isinstance(leaf, LazyLogits) else leaf for leaf in args]
    with torch.no_grad(), no_dispatch():
        return function(logits.form, *others, **kwargs)


def _untracked(source: Source) -> Source:
    """`source` for the result of a function of PyTorch: without a graph if gradients are off."""
    if source.tracked and not torch.is_grad_enabled():
        return dataclasses.replace(source, tracked=False, x=source.x.detach())
    return source


# -- recorded -------------------------------------------------------------------------------------------------------


@handles(_ELEMENTWISE)
def _elementwise(function: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    logits = [value for value in args if isinstance(value, LazyLogits)]
    others = [value for value in args if not isinstance(value, LazyLogits)]
    if any(not isinstance(value, (Number, type(None))) for value in kwargs.values()) or not logits:
        return NotImplemented
    first, own = logits[0], [value for value in others if isinstance(value, Tensor)]
    known = all(isinstance(value, (Number, type(None), Tensor)) for value in others)
    if not known or not all(_fits(each, first) for each in own):
        return NotImplemented
    if not first.source.tracked and torch.is_grad_enabled() and any(each.requires_grad for each in own):
        return NotImplemented  # a graph begins here, e.g. a temperature that is fitted to detached logits
    # One LazyLogits argument is the VALUE of the step; the step reads two of them as Beside.
    forms = iter([VALUE] if len(logits) == 1 else map(Beside, range(len(own), len(own) + len(logits))))
    tensors = map(Beside, range(len(own)))
    placed = [
        next(forms) if isinstance(value, LazyLogits) else next(tensors) if isinstance(value, Tensor) else value
        for value in args
    ]
    numbers = [_shown(value) for value in (*others, *kwargs.values()) if value is not None]
    label = " ".join((name.strip("_"), *(numbers if len(logits) == 1 else ())))
    done: Step = (function, tuple(placed), tuple(kwargs.items()))
    operation = Operation(label, done, tuple(each.reshape(-1 if each.dim() else ()) for each in own))
    if len(logits) > 1:
        return _of_two(logits, operation)
    return recorded(first, operation, _one_of(lambda y: operation.run(y, slice(0, 1)), first).dtype)


def _of_two(logits: list[LazyLogits], operation: Operation) -> Any:
    """An elementwise function of two logits of the same rows, with different operations, as in p * log p."""
    one, *others = (each.source for each in logits)
    if any((other.rows, other.width, other.tracked) != (one.rows, one.width, one.tracked) for other in others):
        return NotImplemented
    if any(each.form.stride() != logits[0].form.stride() for each in logits):
        return NotImplemented
    forms = tuple(each.source.operations for each in logits)
    with torch.no_grad():
        ones = [torch.empty(1, dtype=each.dtype, device=each.device) for each in logits]
        dtype = operation.of(ones[0], ones, slice(0, 1)).dtype
    by_column = all(each.by_column for form in forms for each in form)
    done = dataclasses.replace(operation, forms=forms, by_column=by_column)
    then = dataclasses.replace(_untracked(one), operations=(done,), dtype=dtype)
    return stand_for(then, logits[0], lambda y: operation.of(y, [y, *(each.fill() for each in logits[1:])]))


def _fits(value: Tensor, logits: LazyLogits) -> bool:
    """Whether `value` has one element or one a column, is not partitioned, and keeps the logits' shape and device."""
    if type(value) not in PLAIN_TYPES or value.dim() > logits.dim() or is_partitioned(value):
        return False
    if value.device != logits.device and (value.dim() or value.device.type != "cpu"):
        return False
    return value.numel() == 1 or value.shape.numel() == value.shape[-1] == logits.shape[-1]


def _one_of(function: Callable[[Tensor], Tensor], logits: LazyLogits) -> Tensor:
    """The result of `function` for one element."""
    with torch.no_grad():
        return function(torch.zeros((1,) * logits.dim(), dtype=logits.dtype, device=logits.device))


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"by a tensor of {value.numel()}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


@handles("float double half bfloat16 to type type_as")
def _cast(function: Any, name: str, logits: Any, *args: Any, **kwargs: Any) -> Any:
    given = [*args, *(value for key, value in kwargs.items() if key not in ("non_blocking", "copy"))]
    known = (Tensor, torch.dtype, torch.device, str, bool, type(None))
    if not all(isinstance(each, known) and not isinstance(each, LazyLogits) for each in given):
        return NotImplemented
    if name == "type" and (not given or isinstance(given[0], str)):
        return NotImplemented

    def cast(y: Tensor) -> Any:
        return function(y, *args, **kwargs)

    one = _one_of(cast, logits)
    dtype = one.dtype
    if one.device != logits.device or logits.source.device is not None:
        return _moved_to(one.device, logits, dtype)
    with torch.no_grad():
        if cast(one) is one and one.dtype == logits.dtype:
            return logits
    if not dtype.is_floating_point:
        return NotImplemented
    wider = torch.promote_types(dtype, logits.dtype) == dtype
    copy = (Tensor.to, (VALUE, dtype), (("copy", True),))
    return recorded(logits, Operation(f"cast to {str(dtype)[6:]}", copy, casts_up=wider), dtype)


def _moved_to(device: torch.device, logits: LazyLogits, dtype: torch.dtype) -> Any:
    """`logits` on another device, in `dtype`; functions that read them there still run on the head's device."""
    source = _untracked(logits.source)
    home: Any = stand_for(dataclasses.replace(source, device=None), logits, lambda y: y.to(source.x.device)).to(dtype)
    if device == source.x.device or not isinstance(home, LazyLogits):
        return home.to(device)
    return stand_for(dataclasses.replace(home.source, device=device), home, lambda y: y.to(device))


@handles("softmax log_softmax")
def _softmax(function: Any, name: str, logits: Any, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(logits, LazyLogits) or not is_last(dim, logits):
        return NotImplemented
    dtype = kwargs.get("dtype") or next((value for value in args if isinstance(value, torch.dtype)), None)
    autocast = autocast_dtype(logits)

    def run(y: Tensor) -> Tensor:
        with autocast_as(autocast, y):
            result: Tensor = getattr(torch, name)(y, -1, dtype=dtype)
        return result

    form = None if logits.form.is_contiguous() else _formed(getattr(torch, name), logits, -1)
    return recorded(logits, Operation(name, step(run), by_column=False), _one_of(run, logits).dtype, form)


def is_last(dim: Any, logits: LazyLogits) -> bool:
    """Whether `dim` is the last dimension of `logits`, alone."""
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        (dim,) = dim
    return isinstance(dim, int) and not isinstance(dim, bool) and dim in (-1, logits.dim() - 1)


@handles("__setitem__")
def _set(function: Any, name: str, logits: Any, index: Any, value: Any) -> Any:
    """Sets columns to a number in place, e.g. to forbid tokens: `logits` get one more operation."""
    *rows, columns = index if isinstance(index, tuple) else (index,)
    if not isinstance(logits, LazyLogits) or not isinstance(value, Number) or not _all_rows(rows, logits.dim() - 1):
        return NotImplemented
    source = logits.source
    if type(columns) not in (int, slice, list, *PLAIN_TYPES) or (isinstance(columns, Tensor) and columns.dim() > 1):
        return NotImplemented
    if not _is_alone(logits) or (source.tracked and not torch.is_grad_enabled()):
        return NotImplemented
    taken = torch.zeros(source.width, dtype=torch.bool, device=source.x.device)
    taken[columns] = True
    fill = (Tensor.masked_fill, (VALUE, Beside(0), value), ())
    operation = Operation(f"columns set to {_shown(value)}", fill, (taken,))
    then = dataclasses.replace(source, operations=(*source.operations, operation))
    logits.become(then, lambda y: function(y, index, value))
    return None


def _all_rows(index: list[Any], dimensions: int) -> bool:
    """Whether an index of the leading dimensions takes all of them."""
    if len(index) == 1 and index[0] is ...:
        return True
    return len(index) == dimensions and all(isinstance(part, slice) and part == slice(None) for part in index)


def _is_alone(logits: LazyLogits) -> bool:
    """Whether these are the head's own output and no other logits were made from them, to share a change in place."""
    made = logits.made is not None or bool(logits.source.fetches)
    return not made and [id(member) for member in logits.family] == [id(logits)]


# -- moves of rows --------------------------------------------------------------------------------------------------


@handles("contiguous clone alias")
def _same(function: Any, name: str, logits: Any, *args: Any, **kwargs: Any) -> Any:
    form = _formed(function, logits, *args, **kwargs)
    if form is logits.form:
        return logits
    return moved(logits, logits.source.x, lambda y: function(y, *args, **kwargs), form)


@handles("detach")
def _detach(function: Any, name: str, logits: Any) -> Any:
    source = dataclasses.replace(logits.source, tracked=False, x=logits.source.x.detach())
    return stand_for(source, logits, function, _formed(torch.detach, logits))


@handles("detach_")
def _detach_in_place(function: Any, name: str, logits: Any) -> Any:
    """Pipelining detaches the output of its last stage in place once its backward has run."""
    if not isinstance(logits, LazyLogits) or not _is_alone(logits) or logits.written:
        return NotImplemented
    with no_torch_function():
        function(logits)
    logits.source = dataclasses.replace(logits.source, tracked=False, x=logits.source.x.detach())
    logits.node = None
    wait(logits)
    return logits


HANDLERS[Tensor.data.__get__] = functools.partial(_detach, lambda y: y.data, "data")  # type: ignore[attr-defined]


@handles("view reshape flatten view_as reshape_as")
def _reshape(function: Any, name: str, logits: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(logits, LazyLogits) or any(isinstance(value, torch.dtype) for value in args):
        return NotImplemented
    try:
        form = _formed(function, logits, *args, **kwargs)
    except (RuntimeError, TypeError, IndexError):
        return NotImplemented  # the stock function raises the right error
    if form is logits.form:
        return logits
    if not form.dim() or form.shape[-1] != logits.form.shape[-1]:
        return NotImplemented  # it mixes rows
    x = logits.source.x
    return moved(logits, x.reshape(*form.shape[:-1], x.shape[-1]), lambda y: function(y, *args, **kwargs), form)


@handles("squeeze unsqueeze narrow select split chunk tensor_split unbind transpose swapaxes swapdims permute movedim")
def _move(function: Any, name: str, logits: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(logits, LazyLogits):
        return NotImplemented
    *leading, width = logits.form.shape
    try:
        forms = _formed(function, logits, *args, **kwargs)
        with no_dispatch():
            wider = function(torch.empty(1, device="meta").expand(*leading, width + 1), *args, **kwargs)
    except (RuntimeError, TypeError, IndexError):
        return NotImplemented
    # Compare results for two widths: a result whose last size is not that width shows that the last dimension changed.
    for columns, result in ((width, forms), (width + 1, wider)):
        parts: Iterable[Tensor] = result if isinstance(result, (tuple, list)) else [result]
        if any(not part.dim() or part.shape[-1] != columns for part in parts):
            return NotImplemented
    x = function(logits.source.x, *args, **kwargs)
    if isinstance(x, Tensor):
        return moved(logits, x, lambda y: function(y, *args, **kwargs), forms)

    def part(index: int) -> Callable[[Tensor], Tensor]:
        return lambda y: function(y, *args, **kwargs)[index]

    return type(x)(moved(logits, each, part(index), forms[index]) for index, each in enumerate(x))


@handles("__getitem__")
def _select(function: Any, name: str, logits: Any, index: Any) -> Any:
    if not isinstance(logits, LazyLogits):
        return NotImplemented
    parts = list(index) if isinstance(index, tuple) else [index]
    if not all(part is None or part is ... or type(part) in (int, slice, *PLAIN_TYPES) for part in parts):
        return NotImplemented
    width, has_ellipsis = logits.form.shape[-1], any(part is ... for part in parts)
    if sum(map(_dimensions, parts)) == logits.dim() or (has_ellipsis and parts[-1] is not ...):
        last = parts.pop()
        first, count, by = last.indices(width) if isinstance(last, slice) else (0, 0, 0)
        if (first, by) != (0, 1) or count < width:
            return _narrowed(function, logits, parts, count) if (first, by) == (0, 1) else NotImplemented
        parts.append(slice(None))
    chosen = tuple(map(_number, parts))
    copies = any(isinstance(part, Tensor) for part in chosen)
    if copies and not logits.form.is_contiguous():
        return NotImplemented
    x = logits.source.x[chosen]
    # Numbers and slices select a view, other tensors a copy.
    form = empty((*x.shape[:-1], width)) if copies else _formed(function, logits, chosen)
    return moved(logits, x, lambda y: y[chosen], form)


def _narrowed(function: Any, logits: LazyLogits, rows: list[Any], count: int) -> Any:
    """The first `count` columns of all rows (of a padded vocabulary): the logits of a head with fewer classes."""
    source = _untracked(logits.source)
    if not count or not _all_rows(rows, logits.dim() - 1):
        return NotImplemented
    index = (..., slice(count))
    done: Step = (Tensor.__getitem__, (VALUE, index), ())
    operation = Operation(f"first {count} columns", done, narrows=True)
    then = dataclasses.replace(source, operations=(*source.operations, operation), width=count)
    return stand_for(then, logits, lambda y: y[index], _formed(function, logits, index))


def _number(part: Any) -> Any:
    """A 0-dimensional integer tensor as an int, which selects the same; any other part as it is."""
    return int(part) if type(part) is Tensor and not part.dim() and part.dtype in _INTEGERS else part


def _dimensions(part: Any) -> int:
    """How many dimensions one part of an index takes."""
    if part is None or part is Ellipsis:
        return 0
    return part.dim() if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) else 1
