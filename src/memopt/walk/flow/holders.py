"""Who else keeps a linear's input for backward: one training forward on meta, with gradients, and what autograd saved.

Sampling the rows that a linear keeps frees bytes only where nobody else keeps the same storage. Autograd tells
through saved-tensor hooks which storages are kept; the operation that is running names the keeper. Attention alone is
stood in for: what a fused kernel keeps on a device is not what its written out form keeps on meta. What memopt's own
modules keep is not asked here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memopt.saved_tensors import ObservedTensor, Save, SavedTensorObserver
from memopt.torch_compat import TorchDispatchMode, operator_name
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
        self.table = table
        #: Storages of the arguments of each module that is running.
        self._given: list[frozenset[int | None]] = []
        self._readings: list[_Reading] = []
        self._observer = SavedTensorObserver(
            model,
            entered=self._enter,
            left=self._given.pop,
            stand_ins={F.scaled_dot_product_attention: _attention},
        )

    @contextmanager
    def active(self) -> Iterator[None]:
        with self._observer, saved_tensors_hooks(self._observer.pack, _no_backward), _Contractions(self):
            yield

    def read(self, weight: nn.Parameter, source: Tensor) -> None:
        """`source` is contracted with `weight`, or with a copy of it."""
        modules, key = self._observer.modules, storage_key(source)
        pairs = zip(modules.names, self._given, strict=True)
        given_to = tuple(name for name, keys in pairs if key is not None and key in keys)
        name = self.table.name(weight, modules.current())
        self._readings.append(_Reading(name, source, self._observer.functions.called, given_to))

    def holders(self) -> dict[str, Held]:
        """By weight; asked while the graph of the forward lives."""
        linears = {(reading.function, storage_key(reading.source)) for reading in self._readings}
        held: dict[int | None, dict[str, None]] = {}
        for tensor, save in self._observer.saves():
            key = storage_key(tensor)
            # What a `torch.autograd.Function` saves, it may save for more than the linear that it runs.
            by_a_linear = bool(save.function) and (save.functions_called, key) in linears
            if key is not None and not by_a_linear:
                held.setdefault(key, {})[_holder(save)] = None
        found: dict[str, Held] = {}
        for reading in self._readings:
            now = Held(tuple(held.get(storage_key(reading.source), ())), reading.given_to)
            before = found.get(reading.weight)
            found[reading.weight] = now if before is None else Held(*map(_every_time, before, now))
        return found

    def _enter(self, name: str, args: tuple[Any, ...]) -> None:
        self._given.append(frozenset(storage_key(each) for each in args if isinstance(each, Tensor)))


def _holder(save: Save) -> str:
    name = save.function.split("::")[-1].strip("_")
    who = _OPERATORS.get(name, name) or "an autograd function"
    return f"{who} in {save.module}" if save.module else who


def _no_backward(slot: ObservedTensor) -> Tensor:
    raise RuntimeError("the forward of a walk has no backward")


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
                self.watch.read(b, contraction.a)
            elif a is not None and b is None:
                self.watch.read(a, contraction.b)
        elif name in _COPIES or (name in _SCALES and _is_number(args[1])):
            copied, key = self._parameter(args[0]), storage_key(out)
            if copied is not None and key is not None:
                self._of_weights.setdefault(key, (copied, out))
        return out

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


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The flash and the memory-efficient kernel take four dimensions; anything else is written out, as in stock."""
    if query.dim() == 4:
        fused: Tensor = _FusedAttention.apply(query, key, value)  # type: ignore[no-untyped-call]
        return fused
    written_out: Tensor = F.scaled_dot_product_attention(query, key, value, *args, **kwargs)
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
