"""Operations that save a linear's input or output for backward, observed in training forwards on meta with gradients.

Sampling the rows that a linear saves frees bytes only where no other operation saves the same storage. Saved-tensor
hooks show which storages autograd saves, and in which operation. Attention is replaced, because a fused kernel on a
device saves other tensors than its decomposition on meta. Tensors that memopt's modules save are not considered.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from memopt.environment.generators import seed_cpu
from memopt.recompute.chains import FOLLOWED, ChainCall, Chains, in_order
from memopt.saved.observer import ObservedTensor, Save, SavedTensorObserver
from memopt.torch_compat import TorchDispatchMode, operator_name, tree_leaves
from memopt.walk.aten.contractions import computed_weight, recognise
from memopt.walk.aten.parameters import ParameterTable, storage_key
from memopt.walk.aten.rules import OpCall
from memopt.walk.calls.inputs import Call, run_once
from memopt.walk.flow.functions import FunctionCalls
from memopt.walk.sites import FunctionSite

#: Name of a Python operator -> name of torch's function.
_OPERATORS = {"rdiv": "div", "rpow": "pow", "rmatmul": "matmul"}


class InputUse(NamedTuple):
    """Other uses of the input of one linear, and uses of its output: the fields of `LinearSite` of the same names."""

    saved_by: tuple[str, ...]
    given_to: tuple[str, ...]
    output_module: str = ""
    output_saved_by: tuple[str, ...] = ()


def input_uses(
    model: nn.Module, calls: Sequence[Call], weights: Collection[str], table: ParameterTable
) -> tuple[dict[str, InputUse], tuple[FunctionSite, ...], tuple[str, ...]]:
    """For each of `weights`, the other uses of its linear's input; the functions that save large intermediates; and the
    modules with chains of elementwise operations that save more bytes than the tensors at the start of the chains.

    `calls` of `model`, whose parameters `table` names, run one after the other, in train mode and with gradients, until
    every linear has run. The input of a linear that runs several times counts as saved only if it is saved in each run.
    Weights of linears that no such forward reached are left out. If no parameter requires a gradient, all floating
    parameters do during the forwards. The model is left as it was.
    """
    missing = set(weights)
    uses: dict[str, InputUse] = {}
    functions: dict[str, FunctionSite] = {}
    chains: dict[str, None] = {}
    # Plain calls run first: padded and odd variants mostly reach the same linears.
    for seed, call in enumerate(sorted(calls, key=lambda call: "plain" not in call.label.split())):
        if not missing:
            break
        try:
            found, called, chained = _uses_in(model, call, table, seed)
        except Exception:  # with gradients, a forward that writes into a leaf raises
            continue
        uses = {**found, **uses}
        functions = {site.name: site for site in called} | functions
        chains |= dict.fromkeys(chained)
        missing -= found.keys()
    return uses, tuple(functions.values()), tuple(chains)


def _uses_in(
    model: nn.Module, call: Call, table: ParameterTable, seed: int
) -> tuple[dict[str, InputUse], list[FunctionSite], list[str]]:
    watch = _Watch(model, table)

    def run(target: nn.Module, own: Call) -> Any:
        seed_cpu(seed)  # another seed for each call: layer drop then skips other layers
        for module in target.modules():
            if "gradient_checkpointing" in vars(module):
                vars(module)["gradient_checkpointing"] = False  # a checkpointed block saves only its inputs
        with torch.enable_grad(), watch.active():
            return own.run(target)

    try:
        with _trained(model):
            output = run_once(model, call, run, training=True)
        found = watch.uses(), watch.functions(), watch.chained()
        del output  # its graph owns the saved tensors
        return found
    finally:
        table.forget_copies()
        watch.forget()


@dataclass
class _Call:
    """One call of a module."""

    name: str
    given: frozenset[int | None]
    """Storages of its arguments."""
    nbytes: int = 0
    """Bytes of the largest tensor argument; without one, `nbytes` of the call around it."""
    output: Any = None
    chains: Chains | None = None
    passed: set[ChainCall] = field(default_factory=set)
    """Operations inside of chains: all but the last operation of each."""


@dataclass(frozen=True)
class _Reading:
    """A contraction of a tensor with the parameter `weight`, in the function call with the number `function`."""

    weight: str
    source: Tensor
    function: int
    given_to: tuple[_Call, ...]
    """The calls around it that take the tensor as argument, outermost first."""
    runs_in: str
    """Name of the innermost module that was running."""
    width: int
    """Channels of the output."""


class _Watch(TorchFunctionMode):
    """Observes one forward: the running modules and functions, the saved tensors, the inputs of linears. As a mode, it
    observes functions that may be part of a chain."""

    def __init__(self, model: nn.Module, table: ParameterTable) -> None:
        super().__init__()
        self.table = table
        #: Calls of the modules that are running, the outermost first.
        self._calls: list[_Call] = []
        self._readings: list[_Reading] = []
        #: Module with chains -> the tensors that they begin with; and modules that return a result from inside a chain.
        self._sources: dict[str, dict[Any, None]] = {}
        self._unfit: set[str] = set()
        self._observer = SavedTensorObserver(
            model, entered=self._enter, left=self._leave, stand_ins={F.scaled_dot_product_attention: _attention}
        )
        self._functions = FunctionCalls(model, self._observer.modules.current, lambda: self._observer.functions.called)

    @contextmanager
    def active(self) -> Iterator[None]:
        with (
            self._observer,
            saved_tensors_hooks(self._observer.pack, _no_backward),
            _Contractions(self),
            self,
            self._functions.active(),
        ):
            yield

    def read(self, weight: nn.Parameter, source: Tensor, out: Any) -> None:
        """Record that `source` was contracted with `weight`, or with a copy of it."""
        running, key = self._observer.modules.current(), storage_key(source)
        given_to = tuple(call for call in self._calls if key is not None and key in call.given)
        name, width = self.table.name(weight, running), out.shape[-1] if isinstance(out, Tensor) and out.dim() else 0
        self._readings.append(_Reading(name, source, self._observer.functions.called, given_to, running, width))

    def uses(self) -> dict[str, InputUse]:
        """Uses of each linear's input and output, by weight; call it while the graph of the forward is alive."""
        linears = {(reading.function, storage_key(reading.source)) for reading in self._readings}
        parameters = {storage_key(parameter) for parameter in self.table.by_name.values()}
        saved: dict[int | None, dict[str, None]] = {}
        outputs: dict[int | None, _Saved] = {}
        savers: set[str] = set()
        for tensor, save in self._observer.saves():
            key = storage_key(tensor)
            if key is None:
                continue
            outputs.setdefault(key, _Saved()).add(tensor, save)
            # A `torch.autograd.Function` may save its input for more than the linear that it runs.
            if not save.function or (save.functions_called, key) not in linears:
                saved.setdefault(key, {})[_named(save)] = None
                if save.differentiable and key not in parameters:
                    savers.update(save.modules)
        found: dict[str, InputUse] = {}
        for reading in self._readings:
            given_to = tuple(call.name for call in reading.given_to)
            computed_by, output_saved_by = _output_of(reading, outputs, savers)
            now = InputUse(tuple(saved.get(storage_key(reading.source), ())), given_to, computed_by, output_saved_by)
            before = found.get(reading.weight)
            found[reading.weight] = now if before is None else _in_both(before, now)
        return found

    def functions(self) -> list[FunctionSite]:
        """Functions that save large intermediates; call it while the graph of the forward is alive."""
        parameters = {storage_key(parameter) for parameter in self.table.by_name.values()}
        return self._functions.sites(list(self._observer.saves()), parameters)

    def chained(self) -> list[str]:
        """Modules with chains that save more than their sources, no source changed and no inner result returned."""
        changed = {name for name, its in self._sources.items() if any(x.tensor._version != x.version for x in its)}
        return [name for name in self._sources if name not in self._unfit | changed]

    def forget(self) -> None:
        """Release the tensors: they hold the forward's graph, which holds this object, out of the collector's sight."""
        for each in (self._calls, self._readings, self._sources):
            each.clear()
        self._functions.forget()

    def _enter(self, name: str, args: tuple[Any, ...]) -> None:
        given = [each for each in args if isinstance(each, Tensor)]
        nbytes = max((each.nbytes for each in given), default=0) or (self._calls[-1].nbytes if self._calls else 0)
        self._calls.append(_Call(name, frozenset(map(storage_key, given)), nbytes))

    def _leave(self, output: Any) -> None:
        call = self._calls.pop()
        call.output = output
        if call.chains is not None:
            # The caller may ask for gradients of an inner result, which the graph of a recomputed chain leaves out.
            if any(call.chains.made(each) in call.passed for each in tree_leaves(output)):
                self._unfit.add(call.name)
            call.chains.end()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in FOLLOWED or not self._calls:
            return func(*args, **(kwargs or {}))
        call = self._calls[-1]
        call.chains = call.chains or Chains(None, functools.partial(self._found, call))
        return call.chains.run(func, args, kwargs or {})

    def _found(self, call: _Call, gain: int, last: ChainCall) -> None:
        call.passed.update(each for each in in_order(last) if each is not last)
        if 4 * gain >= call.nbytes:  # a small gain, as from a router's weights, is ignored
            self._sources.setdefault(call.name, {}).update(dict.fromkeys(last.sources))


class _Saved:
    """The saves of one storage: the operations, and the elements that they save."""

    def __init__(self) -> None:
        self.by: dict[str, None] = {}
        self._parts: dict[int, int] = {}

    def add(self, tensor: Tensor, save: Save) -> None:
        self.by[_named(save)] = None
        start = int(tensor.storage_offset())
        self._parts[start] = max(tensor.numel(), self._parts.get(start, 0))

    @property
    def elements(self) -> int:
        return sum(self._parts.values())


def _output_of(
    reading: _Reading, saved: Mapping[int | None, _Saved], savers: Collection[str]
) -> tuple[str, tuple[str, ...]]:
    """The module that computes a linear's output from its input alone (its own, or one around it that adds an adapter's
    output), and the operations that save most of the output. Inside `savers`, operations other than linears save a
    tensor of the graph."""
    calls = reading.given_to[::-1]
    if not calls or calls[0].name != reading.runs_in:
        return "", ()
    for call in calls:
        output = call.output
        if (call is not calls[0] and call.name in savers) or not isinstance(output, Tensor):
            break
        held = saved.get(storage_key(output))
        is_whole = output.dim() and output.shape[-1] == reading.width
        if held is not None and is_whole and 2 * held.elements > output.numel():  # a small saved view is kept as a copy
            return call.name, tuple(held.by)
    return calls[0].name, ()


def _named(save: Save) -> str:
    name = save.function.split("::")[-1].strip("_")
    operation = _OPERATORS.get(name, name) or "an autograd function"
    return f"{operation} in {save.module}" if save.module else operation


def _no_backward(slot: ObservedTensor) -> Tensor:
    raise RuntimeError("the forward of a walk has no backward")


class _Contractions(TorchDispatchMode):
    """Records what is contracted with a parameter or with a copy of one."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        table, call = self.watch.table, OpCall(func, operator_name(func), args, kwargs, out)
        contraction = recognise(call)
        table.compute(call)
        if contraction is not None:
            a, b = table.view(contraction.a), table.view(contraction.b)
            if b is not None and a is None:
                self.watch.read(b.parameter, contraction.a, out)
            elif a is not None and b is None:
                self.watch.read(a.parameter, contraction.b, out)
            elif (computed := computed_weight(call, contraction, table)) is not None:
                self.watch.read(computed[0], computed[2], out)
        elif (source := next((t for t in call.tensors if table.view(t) is not None), None)) is not None:
            table.follow(call.name, args, source, call.outputs)
        return out


class _FusedAttention(torch.autograd.Function):
    """Shapes and saved tensors of a fused attention kernel: query, key, value, and the output, contiguous by token."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, heads, tokens, _ = query.shape
        output = query.new_empty(batch, tokens, heads, value.shape[-1]).transpose(1, 2)
        ctx.save_for_backward(query, key, value, output)
        return output


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Stands for the flash and memory-efficient kernels, which take four dimensions; other inputs run decomposed."""
    if query.dim() == 4:
        fused: Tensor = _FusedAttention.apply(query, key, value)  # type: ignore[no-untyped-call]
        return fused
    decomposed: Tensor = F.scaled_dot_product_attention(query, key, value, *args, **kwargs)
    return decomposed


@contextmanager
def _trained(model: nn.Module) -> Iterator[None]:
    """If no parameter of `model` requires a gradient, all floating ones do inside the context."""
    frozen = [] if any(p.requires_grad for p in model.parameters()) else [*model.parameters()]
    changed = [parameter for parameter in frozen if parameter.is_floating_point()]
    try:
        for parameter in changed:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(False)


def _in_both(before: InputUse, now: InputUse) -> InputUse:
    """The uses of a linear that ran twice, combined from both runs."""
    computed_by = before.output_module if before.output_module == now.output_module else ""
    return InputUse(
        _every_time(before.saved_by, now.saved_by),
        _every_time(before.given_to, now.given_to),
        computed_by,
        _every_time(before.output_saved_by, now.output_saved_by) if computed_by else (),
    )


def _every_time(before: tuple[str, ...], now: tuple[str, ...]) -> tuple[str, ...]:
    """The names of both calls if each has some; otherwise none."""
    return tuple(dict.fromkeys((*before, *now))) if before and now else ()
