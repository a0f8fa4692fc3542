"""Who else keeps a linear's input for backward: one training forward on meta, with gradients, and what autograd saved.

Sampling the rows that a linear keeps frees bytes only where nobody else keeps the same storage. Autograd tells
through saved-tensor hooks which storages are kept; the operation that is running names the keeper. Attention alone is
stood in for: what a fused kernel keeps on a device is not what its written out form keeps on meta. What memopt's own
modules keep is not asked here.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from memopt.torch_compat import TorchDispatchMode, is_operator, operator_name, storage_id
from memopt.walk.aten.contractions import recognise
from memopt.walk.aten.parameters import ParameterTable, storage_key
from memopt.walk.aten.rules import OpCall
from memopt.walk.calls.inputs import Call, run_once

#: Operations whose output is a weight still, cast, gathered, or, with one number, scaled.
_COPIES, _SCALES = frozenset({"_to_copy", "clone", "index", "index_select"}), frozenset({"mul", "div"})
#: Names of Python's operators that torch has functions of its own for.
_OPERATORS = {"rdiv": "div", "rpow": "pow", "rmatmul": "matmul"}


class Held(NamedTuple):
    """Who else holds the input of one linear."""

    by: tuple[str, ...]
    """The operations other than linears that keep it, as ``"relu in mlp.act"``."""
    given_to: tuple[str, ...]
    """The modules around the linear that were given it, the outermost first: their callers hold it while they run."""


def input_holders(
    model: nn.Module, calls: Sequence[Call], weights: Collection[str], table: ParameterTable
) -> dict[str, Held]:
    """For each of `weights`, who else holds its linear's input.

    `calls` of `model`, whose parameters `table` names, run one after the other, in train mode and with gradients, until
    every linear was seen. A linear that runs several times has holders only if every one of its inputs has. Weights of
    linears that no such forward reached are left out. Where no parameter requires a gradient, all do. The model is left
    as it was.
    """
    missing = set(weights)
    holders: dict[str, Held] = {}
    # Variants of a call mostly reach what it reaches: they come last.
    for seed, call in enumerate(sorted(calls, key=lambda call: "plain" not in call.label.split())):
        if not missing:
            break
        try:
            found = _holders_in(model, call, table, seed)
        except Exception:  # what runs without gradients may refuse them: a write into a leaf
            continue
        holders = {**found, **holders}
        missing -= found.keys()
    return holders


def _holders_in(model: nn.Module, call: Call, table: ParameterTable, seed: int) -> dict[str, Held]:
    watch = _Watch(model, table)

    def run(target: nn.Module, own: Call) -> Any:
        torch.default_generator.manual_seed(seed)  # layers that are dropped at random are others in the next call
        for module in target.modules():
            if "gradient_checkpointing" in vars(module):
                vars(module)["gradient_checkpointing"] = False  # such a block keeps later what it keeps here now
        with torch.enable_grad(), watch.active():
            return own.run(target)

    with _trained(model):
        output = run_once(model, call, run, training=True)
    found = watch.holders()
    del output  # its graph is what keeps the tensors
    return found


class _Slot:
    """What autograd holds in the place of a tensor, exactly as long as it would keep the tensor."""

    __slots__ = ("__weakref__", "storage")

    def __init__(self, storage: torch.UntypedStorage | None) -> None:
        self.storage = storage


@dataclass(frozen=True)
class _Reading:
    """A contraction of a tensor with the parameter `weight`, run by the function call number `function`."""

    weight: str
    source: Tensor
    function: int
    given_to: tuple[str, ...]


class _Watch:
    """One forward: which module and function run, what is saved, what linears read."""

    def __init__(self, model: nn.Module, table: ParameterTable) -> None:
        self.names = {id(module): name for name, module in model.named_modules()}
        self.table = table
        self.modules: list[str] = []
        #: Storages of the arguments of each of these.
        self.given: list[frozenset[int | None]] = []
        self.function, self.calls = "", 0
        self.readings: list[_Reading] = []
        self._saved: list[tuple[weakref.ref[_Slot], int, str]] = []

    @property
    def here(self) -> str:
        """Name of the innermost module that is running."""
        return self.modules[-1] if self.modules else ""

    @contextmanager
    def active(self) -> Iterator[None]:
        with ExitStack() as stack:
            for handle in (
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._leave, always_call=True),
            ):
                stack.callback(handle.remove)
            stack.enter_context(saved_tensors_hooks(self._pack, self._unpack))
            stack.enter_context(_Functions(self))
            stack.enter_context(_Contractions(self))
            yield

    def holders(self) -> dict[str, Held]:
        """By weight; asked while the graph of the forward lives."""
        linears = {(reading.function, storage_key(reading.source)) for reading in self.readings}
        held: dict[int | None, dict[str, None]] = {}
        for reference, function, who in self._saved:
            slot = reference()
            if slot is not None and slot.storage is not None and (function, storage_id(slot.storage)) not in linears:
                held.setdefault(storage_id(slot.storage), {})[who] = None
        found: dict[str, Held] = {}
        for reading in self.readings:
            now = Held(tuple(held.get(storage_key(reading.source), ())), reading.given_to)
            before = found.get(reading.weight)
            found[reading.weight] = now if before is None else Held(*map(_every_time, before, now))
        return found

    def _pack(self, tensor: Tensor) -> _Slot:
        slot = _Slot(tensor.untyped_storage() if storage_key(tensor) is not None else None)
        who = self.function or "an autograd function"
        where = f" in {self.here}" if self.here else ""
        self._saved.append((weakref.ref(slot), self.calls, who + where))
        return slot

    @staticmethod
    def _unpack(slot: _Slot) -> Tensor:
        raise RuntimeError("the forward of a walk has no backward")

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.modules.append(self.names.get(id(module), self.here))
        self.given.append(frozenset(storage_key(each) for each in args if isinstance(each, Tensor)))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.modules.pop()
        self.given.pop()


class _Functions(TorchFunctionMode):
    """Numbers the functions that Python calls and names the one that runs; runs attention by a stand-in."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        watch = self.watch
        watch.calls += 1
        watch.function = _name(func)
        try:
            if func is F.scaled_dot_product_attention:
                return _attention(func, *args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))
        finally:
            watch.function = ""


class _Contractions(TorchDispatchMode):
    """Records what is contracted with a parameter, or with a copy of one."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watch = watch
        #: Storage -> the parameter whose elements are in it, and a tensor that keeps the storage, so the key, in use.
        self._of_weights: dict[int, tuple[nn.Parameter, Tensor]] = {}
        for parameter in watch.table.by_name.values():
            if (key := storage_key(parameter)) is not None:
                self._of_weights.setdefault(key, (parameter, parameter))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = operator_name(func)
        contraction = recognise(OpCall(func, name, args, kwargs, out))
        if contraction is not None:
            a, b = self._parameter(contraction.a), self._parameter(contraction.b)
            if b is not None and a is None:
                self._read(b, contraction.a)
            elif a is not None and b is None:
                self._read(a, contraction.b)
        elif name in _COPIES or (name in _SCALES and _is_number(args[1])):
            copied, key = self._parameter(args[0]), storage_key(out)
            if copied is not None and key is not None:
                self._of_weights.setdefault(key, (copied, out))
        return out

    def _read(self, weight: nn.Parameter, source: Tensor) -> None:
        watch = self.watch
        key = storage_key(source)
        given = (name for name, keys in zip(watch.modules, watch.given, strict=True) if key is not None and key in keys)
        watch.readings.append(_Reading(watch.table.name(weight, watch.here), source, watch.calls, tuple(given)))

    def _parameter(self, tensor: Tensor) -> nn.Parameter | None:
        """The parameter that `tensor` is a view of, or a copy."""
        key = storage_key(tensor)
        found = self._of_weights.get(key) if key is not None else None
        return found[0] if found is not None else None


class _FusedAttention(torch.autograd.Function):
    """Shapes and what is kept of a fused attention kernel: queries, keys, values, and the output, one token a row."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, heads, tokens, _ = query.shape
        output = query.new_empty(batch, tokens, heads, value.shape[-1]).transpose(1, 2)
        ctx.save_for_backward(query, key, value, output)
        return output


def _attention(stock: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The flash and the memory-efficient kernel take four dimensions; anything else is written out, as in stock."""
    if query.dim() == 4:
        fused: Tensor = _FusedAttention.apply(query, key, value)  # type: ignore[no-untyped-call]
        return fused
    written_out: Tensor = stock(query, key, value, *args, **kwargs)
    return written_out


@contextmanager
def _trained(model: nn.Module) -> Iterator[None]:
    """Some parameter requires a gradient: if none does, all that can."""
    frozen = [] if any(p.requires_grad for p in model.parameters()) else [*model.parameters()]
    changed = [parameter for parameter in frozen if parameter.is_floating_point()]
    try:
        for parameter in changed:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(False)


def _every_time(before: tuple[str, ...], now: tuple[str, ...]) -> tuple[str, ...]:
    """All of both; nobody where one call had nobody."""
    return tuple(dict.fromkeys((*before, *now))) if before and now else ()


def _is_number(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.numel() == 1


@functools.cache
def _name(function: Any) -> str:
    """Name of a function or operator as a user knows it."""
    if is_operator(function):
        name = operator_name(function).strip("_")
    else:
        name = (getattr(function, "__name__", "") or str(function)).strip("_")
    return _OPERATORS.get(name, name)
