"""What else saves a linear's input and output for backward, observed in a training forward on meta with gradients.

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
from memopt.walk.aten.contractions import recognise
from memopt.walk.aten.parameters import ParameterTable, storage_key
from memopt.walk.aten.rules import OpCall
from memopt.walk.calls.inputs import Call, run_once
from memopt.walk.flow.functions import FunctionCalls
from memopt.walk.sites import FunctionSite

#: Names of Python's operators -> those of torch's functions.
_OPERATORS = {"rdiv": "div", "rpow": "pow", "rmatmul": "matmul"}


class InputUse(NamedTuple):
    """Other uses of the input of one linear, and uses of its output."""

    saved_by: tuple[str, ...]
    """The operations other than linears that save it, as ``"relu in mlp.act"``."""
    given_to: tuple[str, ...]
    """The modules around the linear that take it as argument, outermost first: their callers reference it meanwhile."""
    output_module: str = ""
    """The module that computes its output, adapters included, from its input; empty where none does that alone."""
    output_saved_by: tuple[str, ...] = ()
    """The operations other than linears that save the output of that module."""


def input_uses(
    model: nn.Module, calls: Sequence[Call], weights: Collection[str], table: ParameterTable
) -> tuple[dict[str, InputUse], tuple[FunctionSite, ...], tuple[str, ...]]:
    """For each of `weights`, the other uses of its linear's input; the functions that save much; and the modules with
    chains of elementwise operations that save more than what they begin with.

    `calls` of `model`, whose parameters `table` names, run one after the other, in train mode and with gradients, until
    every linear was reached. The input of a linear that runs several times counts as saved only if every one of its
    inputs is. Weights of linears that no such forward reached are left out. Where no parameter requires a gradient, all
    do. The model is left as it was.
    """
    missing = set(weights)
    uses: dict[str, InputUse] = {}
    functions: dict[str, FunctionSite] = {}
    chains: dict[str, None] = {}
    # Padded and odd variants mostly reach the same linears: they come last.
    for seed, call in enumerate(sorted(calls, key=lambda call: "plain" not in call.label.split())):
        if not missing:
            break
        try:
            found, called, chained = _uses_in(model, call, table, seed)
        except Exception:  # a forward that runs without gradients may raise with them: it writes into a leaf
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
        seed_cpu(seed)  # so that layer drop leaves out other layers in the next call
        for module in target.modules():
            if "gradient_checkpointing" in vars(module):
                vars(module)["gradient_checkpointing"] = False  # it would save nothing in this forward
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


@dataclass
class _Call:
    """One call of a module."""

    name: str
    given: frozenset[int | None]
    """Storages of its arguments."""
    nbytes: int = 0
    """Of the largest of them, or of those of the call around it."""
    output: Any = None
    chains: Chains | None = None
    passed: set[ChainCall] = field(default_factory=set)
    """The operations inside of chains."""


@dataclass(frozen=True)
class _Reading:
    """A contraction of a tensor with the parameter `weight`, run by the function call number `function`."""

    weight: str
    source: Tensor
    function: int
    given_to: tuple[_Call, ...]
    """The calls around it that take the tensor as argument, outermost first."""
    runs_in: str
    """Name of the innermost module that was running."""
    width: int
    """Channels of what it gives."""


class _Watch:
    """Observes one forward: which module and function run, what is saved, what linears read."""

    def __init__(self, model: nn.Module, table: ParameterTable) -> None:
        self.table = table
        #: Of the modules that are running, the outermost first.
        self._calls: list[_Call] = []
        self._readings: list[_Reading] = []
        #: Module with chains -> what they begin with; and modules that return what is inside of a chain.
        self._sources: dict[str, dict[Any, None]] = {}
        self._unfit: set[str] = set()
        self._observer = SavedTensorObserver(
            model,
            entered=self._enter,
            left=self._leave,
            stand_ins={F.scaled_dot_product_attention: _attention},
        )
        self._functions = FunctionCalls(model, self._observer.modules.current, lambda: self._observer.functions.called)

    @contextmanager
    def active(self) -> Iterator[None]:
        with (
            self._observer,
            saved_tensors_hooks(self._observer.pack, _no_backward),
            _Contractions(self),
            _Functions(self),
            self._functions.active(),
        ):
            yield

    def read(self, weight: nn.Parameter, source: Tensor, out: Any) -> None:
        """`source` is contracted with `weight`, or with a copy of it."""
        running, key = self._observer.modules.current(), storage_key(source)
        given_to = tuple(call for call in self._calls if key is not None and key in call.given)
        name, width = self.table.name(weight, running), out.shape[-1] if isinstance(out, Tensor) and out.dim() else 0
        self._readings.append(_Reading(name, source, self._observer.functions.called, given_to, running, width))

    def uses(self) -> dict[str, InputUse]:
        """By weight; to be called while the graph of the forward is alive."""
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
        """To be called while the graph of the forward is alive."""
        parameters = {storage_key(parameter) for parameter in self.table.by_name.values()}
        return self._functions.sites(list(self._observer.saves()), parameters)

    def chained(self) -> list[str]:
        """The modules with chains that save more than what they begin with, which nobody changes."""
        changed = {name for name, its in self._sources.items() if any(x.tensor._version != x.version for x in its)}
        return [name for name in self._sources if name not in self._unfit | changed]

    def _enter(self, name: str, args: tuple[Any, ...]) -> None:
        given = [each for each in args if isinstance(each, Tensor)]
        nbytes = max((each.nbytes for each in given), default=0) or (self._calls[-1].nbytes if self._calls else 0)
        self._calls.append(_Call(name, frozenset(map(storage_key, given)), nbytes))

    def _leave(self, output: Any) -> None:
        call = self._calls.pop()
        call.output = output
        if call.chains is not None:
            # Whoever reads it outside may ask for the gradient of all that is made of it.
            if any(call.chains.made(each) in call.passed for each in tree_leaves(output)):
                self._unfit.add(call.name)
            call.chains.end()

    def run(self, function: Any, args: Any, kwargs: Any) -> Any:
        """A function that chains may have, called in the code of the innermost module."""
        if not self._calls:
            return function(*args, **kwargs)
        call = self._calls[-1]
        call.chains = call.chains or Chains(None, functools.partial(self._found, call))
        return call.chains.run(function, args, kwargs)

    def _found(self, call: _Call, gain: int, last: ChainCall) -> None:
        call.passed.update(each for each in in_order(last) if each is not last)
        if 4 * gain >= call.nbytes:  # not the weights of a router
            self._sources.setdefault(call.name, {}).update(dict.fromkeys(last.sources))


class _Functions(TorchFunctionMode):
    """Shows a watch the functions that chains may have."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._watch.run(func, args, kwargs or {}) if func in FOLLOWED else func(*args, **(kwargs or {}))


class _Saved:
    """What is saved of one storage."""

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
    """The module that computes the output of a linear from its input alone, and what saves most of that output.

    The linear's own module, or one around it that adds to it what comes from the same input by linears alone: `savers`
    are the modules inside which other operations save something.
    """
    calls = reading.given_to[::-1]
    if not calls or calls[0].name != reading.runs_in:
        return "", ()
    for call in calls:
        output = call.output
        if (call is not calls[0] and call.name in savers) or not isinstance(output, Tensor):
            break
        held = saved.get(storage_key(output))
        is_whole = output.dim() and output.shape[-1] == reading.width
        if held is not None and is_whole and 2 * held.elements > output.numel():  # a small view is copied instead
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
        super().__init__()  # type: ignore[no-untyped-call]
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        table, call = self.watch.table, OpCall(func, operator_name(func), args, kwargs, out)
        contraction = recognise(call)
        if contraction is not None:
            a, b = table.view(contraction.a), table.view(contraction.b)
            if b is not None and a is None:
                self.watch.read(b.parameter, contraction.a, out)
            elif a is not None and b is None:
                self.watch.read(a.parameter, contraction.b, out)
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
    """The flash and the memory-efficient kernel take four dimensions; anything else runs decomposed, as in stock."""
    if query.dim() == 4:
        fused: Tensor = _FusedAttention.apply(query, key, value)  # type: ignore[no-untyped-call]
        return fused
    decomposed: Tensor = F.scaled_dot_product_attention(query, key, value, *args, **kwargs)
    return decomposed


@contextmanager
def _trained(model: nn.Module) -> Iterator[None]:
    """If no parameter requires a gradient, all floating ones do inside."""
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
    """The uses of a linear that was called twice."""
    computed_by = before.output_module if before.output_module == now.output_module else ""
    return InputUse(
        _every_time(before.saved_by, now.saved_by),
        _every_time(before.given_to, now.given_to),
        computed_by,
        _every_time(before.output_saved_by, now.output_saved_by) if computed_by else (),
    )


def _every_time(before: tuple[str, ...], now: tuple[str, ...]) -> tuple[str, ...]:
    """All of both, if each call had some."""
    return tuple(dict.fromkeys((*before, *now))) if before and now else ()
