"""Chains of elementwise operations and views in a forward, followed back to the tensors that they begin with.

A chain is recomputed from these tensors, its *sources*, if stock operations would save more bytes. The bytes of an
operation are measured once for each form of a call: `x * y` saves one factor, both or none, `sigmoid` saves its result.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memopt.recompute.pure import on_meta
from memopt.torch_compat import PLAIN_TYPES, any_autocast_enabled, no_modes, no_torch_function, storage_id, tensor_hooks

#: Beside elementwise functions, means and deviations of rows: they cost as little.
_ELEMENTWISE = """add sub rsub mul div true_divide neg pow square exp exp2 expm1 log log2 log1p sqrt rsqrt abs
    sigmoid tanh relu relu6 silu gelu elu leaky_relu hardtanh softplus softsign mish logsigmoid clamp clip clamp_min
    clamp_max where maximum minimum sin cos erf masked_fill gt lt ge le eq ne logical_not logical_and logical_or to type
    float double half bfloat16 mean std var __rsub__ __rdiv__ __rtruediv__ __rpow__ __pow__"""
_VIEWS = """view reshape unsqueeze squeeze transpose permute flatten unflatten expand chunk split unbind select narrow
    contiguous __getitem__"""


def _functions(names: str, *owners: Any) -> frozenset[Any]:
    return frozenset(getattr(each, name) for each in owners for name in names.split() if hasattr(each, name))


#: Functions that return views, or copies of all elements.
_ARE_VIEWS = _functions(_VIEWS, Tensor, torch)
#: Functions that are followed.
FOLLOWED = _ARE_VIEWS | _functions(_ELEMENTWISE, Tensor, torch, F)
#: Types of indices that select a view; other indices gather.
_INDICES = (int, slice, type(None), type(...))
#: The least saving, relative to the sources; and the largest copied parameter, relative to the largest operand.
_LEAST, _SMALL = 1 / 16, 1 / 16
#: Most operations of one chain; an operation that several others read counts once for each.
_LONGEST = 64


_numbers = itertools.count()


class _Source:
    """A tensor that chains begin with."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor, tensor._version
        self.is_parameter = isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)


class ChainCall:
    """One operation of a chain: a function and its arguments, with operands in the place of tensors."""

    def __init__(self, function: Any, args: Any, kwargs: Any, operands: Sequence[_Operand]) -> None:
        self.function, self.args, self.kwargs, self.key = function, args, kwargs, object()
        self.number = next(_numbers)
        self.before = [each.call for each in operands if isinstance(each, _Made)]
        self.sources: dict[_Source, None] = {each: None for each in operands if isinstance(each, _Source)}
        self.saved: dict[Any, int] = {}
        """Source, or key of an operation whose result stock operations up to here save -> bytes."""
        self.length: int = 1 + sum(each.length for each in self.before)
        for each in self.before:
            self.sources |= each.sources
            self.saved |= each.saved


class _Made(NamedTuple):
    """A tensor that an operation made, and its index if the operation has several outputs."""

    call: ChainCall
    part: int | None


_Operand = _Source | _Made


class _Place(NamedTuple):
    """Stands in a step for a source or a result, or for a part of it."""

    number: int
    part: int | None


#: Form of a call -> (indices of the operands that it saves, bytes of other saved tensors relative to the largest
#: operand); None if it returns one of its operands or cannot be measured.
_measured: dict[Any, tuple[list[int], float] | None] = {}
#: replace(value, run, sources, parameters) -> `value`, which is ``run(sources, parameters)``, with a node that saves
#: the sources and copies of the parameters.
Replace = Callable[[Tensor, Callable[..., Tensor], list[Tensor], list[Tensor]], Tensor]


class Chains:
    """The chains in one call of a module. `replace` gives the result of an operation a node that recomputes the chain,
    if that saves bytes; None: never. `found` gets the bytes that such a chain saves, and its last operation."""

    def __init__(self, replace: Replace | None, found: Callable[[int, ChainCall], None] | None = None) -> None:
        self._replace, self._found = replace, found
        self._known: dict[int, tuple[weakref.ref[Tensor], int, _Made]] = {}
        self._sources: weakref.WeakValueDictionary[int, _Source] = weakref.WeakValueDictionary()

    def end(self) -> None:
        """The call has returned: nothing here may hold the sources any longer."""
        self._known.clear()

    def made(self, x: object) -> ChainCall | None:
        """The operation that made `x`, if it was followed."""
        known = self._known.get(id(x))
        return None if known is None or known[0]() is not x else known[2].call

    def run(self, function: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """``function(*args, **kwargs)``, where `function` is one of `FOLLOWED`."""
        with no_torch_function():
            given = [each for each in _leaves((args, kwargs)) if isinstance(each, Tensor)]
            call = self._call(function, args, kwargs, given)
            # All that decides which tensors a call saves.
            form = function, any_autocast_enabled(), *map(_kind, _leaves((args, tuple(kwargs.items()))))
        if call is not None and form not in _measured:
            _measured[form] = _measure(function, args, kwargs, given)
        if call is None or (saves := _measured[form]) is None:
            return function(*args, **kwargs)
        with no_torch_function():
            is_replaced = self._is_worth_it(call, *saves, given) and self._replace is not None
        with torch.set_grad_enabled(not is_replaced):
            output = function(*args, **kwargs)
        with no_torch_function():
            if is_replaced and isinstance(output, Tensor) and (output.is_floating_point() or output.is_complex()):
                output = self._replace(output, *_steps(call))  # type: ignore[misc]
            for part, each in enumerate(output) if isinstance(output, (tuple, list)) else ((None, output),):
                if type(each) in PLAIN_TYPES:
                    reference = weakref.ref(each, functools.partial(self._known.pop, id(each)))
                    self._known[id(each)] = reference, each._version, _Made(call, part)
        return output

    def _call(self, function: Any, args: Any, kwargs: Mapping[str, Any], given: Sequence[Tensor]) -> ChainCall | None:
        """The operation, if it can be part of a chain."""
        is_recorded = torch.is_grad_enabled() and any(each.requires_grad for each in given)
        if not is_recorded or not all(type(each) in PLAIN_TYPES and not each.is_inference() for each in given):
            return None
        if function is Tensor.__getitem__ and any(type(each) not in _INDICES for each in _leaves(args[1:])):
            return None
        operands = {id(each): self._operand(each) for each in given}
        placed = [_mapped(lambda each: operands.get(id(each), each), values) for values in (args, dict(kwargs))]
        call = ChainCall(function, placed[0], placed[1], [*operands.values()])
        # Sharded training may free a parameter before backward: a copy of it is saved, so it must be small.
        copied = [each.tensor.numel() for each in call.sources if each.is_parameter]
        if len(copied) == len(call.sources) or max(copied, default=0) > _SMALL * max(each.numel() for each in given):
            return None
        return call if call.length <= _LONGEST else None

    def _operand(self, x: Tensor) -> _Operand:
        known = self._known.get(id(x))
        # A tensor with a hook or retain_grad begins a new chain: its gradient must exist in the graph.
        if known is not None and known[0]() is x and known[1] == x._version and not (tensor_hooks(x) or x.retains_grad):
            made = known[2]
            if all(each.tensor._version == each.version for each in made.call.sources):
                return made
        source = self._sources.get(id(x))
        if source is None or source.version != x._version:
            source = self._sources[id(x)] = _Source(x)
        return source

    def _is_worth_it(self, call: ChainCall, saved: Sequence[int], others: float, given: Sequence[Tensor]) -> bool:
        """Whether the sources take fewer bytes than the tensors that stock operations save for the chain."""
        for i in saved:
            if (filled := _filled_by(self._operand(given[i]))) is not None:
                call.saved[filled] = (filled.tensor if isinstance(filled, _Source) else given[i]).nbytes
        if others:
            call.saved[call.key] = int(others * max(each.nbytes for each in given))
        cost = sum(each.tensor.nbytes for each in call.sources)
        gain = sum(call.saved.values()) - cost
        if call.function in _ARE_VIEWS or gain <= _LEAST * cost:
            return False
        if self._found is not None:
            self._found(gain, call)
        return True


def in_order(last: ChainCall) -> list[ChainCall]:
    """The operations of a chain in the order of the forward, so that backward sums gradients in the stock order."""
    todo, found = [last], {last}
    while todo:
        before = todo.pop().before
        todo += [each for each in before if each not in found]
        found.update(before)
    return sorted(found, key=lambda each: each.number)


def _steps(last: ChainCall) -> tuple[Callable[..., Tensor], list[Tensor], list[Tensor]]:
    """A chain as a function without tensors, its sources that are no parameters, and its parameters."""
    sources = sorted(last.sources, key=lambda each: each.is_parameter)
    numbers: dict[Any, int] = {each: i for i, each in enumerate(sources)}

    def place(each: Any) -> Any:
        if isinstance(each, _Made):
            return _Place(numbers[each.call], each.part)
        return _Place(numbers[each], None) if isinstance(each, _Source) else each

    calls = []
    for call in in_order(last):
        numbers[call] = len(numbers)
        calls.append((call.function, _mapped(place, call.args), _mapped(place, call.kwargs)))
    tensors, copied = ([each.tensor for each in sources if each.is_parameter is kind] for kind in (False, True))
    return functools.partial(_run, calls), tensors, copied


def _run(calls: Sequence[tuple[Any, Any, Any]], sources: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    values: list[Any] = [*sources, *parameters]

    def value(each: Any) -> Any:
        if not isinstance(each, _Place):
            return each
        return values[each.number] if each.part is None else values[each.number][each.part]

    for function, args, kwargs in calls:
        values.append(function(*_mapped(value, args), **_mapped(value, kwargs)))
    result: Tensor = values[-1]
    return result


def _filled_by(operand: _Operand) -> Any:
    """The origin of the values of a tensor, views aside: a source, or the key of an operation."""
    while isinstance(operand, _Made) and operand.call.function in _ARE_VIEWS:
        parts = _leaves((operand.call.args, operand.call.kwargs))
        operand = next(each for each in parts if isinstance(each, (_Source, _Made)))
    if isinstance(operand, _Made):
        return operand.call.key
    return None if operand.is_parameter else operand


def _measure(function: Any, args: Any, kwargs: Any, given: Sequence[Tensor]) -> tuple[list[int], float] | None:
    """The value for `_measured`, from a call on meta tensors that is hidden from active modes and hooks."""
    saved: list[Tensor] = []
    copies: dict[int, Tensor] = {}
    with no_modes(), no_torch_function(), contextlib.suppress(Exception):
        values, named = on_meta(tuple(args), copies), {name: on_meta(each, copies) for name, each in kwargs.items()}
        with saved_tensors_hooks(lambda tensor: saved.append(tensor.detach()), lambda _: torch.empty(0)):
            output = function(*values, **named)
        if any(each is one for each in _leaves(output) for one in copies.values()):
            return None
        own = [storage_id(copies[id(each)].untyped_storage()) for each in given]
        kept = {storage_id(each.untyped_storage()): each for each in saved if each.numel() > 1}
        others = sum(each.nbytes for key, each in kept.items() if key not in own)
        return [i for i, key in enumerate(own) if key in kept], others / max(1, *(each.nbytes for each in given))
    return None


def _kind(each: Any) -> Any:
    if isinstance(each, Tensor):
        return each.dtype, each.requires_grad, each.dim() == 0
    return each if isinstance(each, (bool, str, torch.dtype)) else type(each)


def _leaves(value: Any) -> Iterator[Any]:
    if type(value) in (tuple, list):
        for each in value:
            yield from _leaves(each)
    elif type(value) is dict:
        yield from _leaves(tuple(value.values()))
    else:
        yield value


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    if type(value) in (tuple, list):
        return type(value)([_mapped(function, each) for each in value])
    if type(value) is dict:
        return {name: _mapped(function, each) for name, each in value.items()}
    return function(value)
