"""The states of an optimizer and the storages that its step allocates, from a run on meta tensors or from a formula."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from memopt.prediction.setup import Setup
from memopt.torch_compat import TracingMode, operator_schema, storage_id, tree_leaves
from memopt.trace.events import Event, Storage
from memopt.walk.aten.rules import tensors_in

#: bitsandbytes/optim/optimizer.py: elements in a block of a state, the least elements of a tensor whose states have 8
#: bits, the entries of each of its two maps from codes to values, the least elements of a tensor with paged states.
_BLOCK, _LEAST_8BIT, _MAP, _LEAST_PAGED = 256, 4096, 256, 100_000
#: flashoptim/optimizers.py (0.1.4): elements that share a scale in fp16.
_GROUP = 32
#: torchao/optim/cpu_offload.py: the least elements of a tensor whose states are in the host's memory.
_LEAST_OFFLOADED = 4096
#: Optimizers of bitsandbytes with states of 8 bits.
EIGHT_BITS = ("adamw8bit", "adamw8bit-paged")
#: Shape and dtype of a parameter.
Form = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class OptimizerTrace:
    """The storages of an optimizer from its second step on."""

    states: tuple[Storage, ...]
    """Storages that are kept between steps."""
    events: tuple[Event, ...]
    """Allocations and frees of one step; everything that the step allocates is freed."""


@lru_cache(maxsize=32)
def follow(
    forms: tuple[Form, ...], setup: Setup, cuda: bool = True, marks: tuple[bool, ...] | None = None
) -> OptimizerTrace:
    """Trace a step of the optimizer of `setup` for parameters of these `forms`.

    Optimizers of PyTorch and transformers run, except the fused AdamW; it and the others are formulas of their code.

    Args:
        forms: shapes and dtypes of the trained parameters, one entry for each.
        setup: its `optimizer` is read.
        cuda: whether PyTorch's foreach steps work on lists of parameters, as on CUDA, or on one after another.
        marks: for ``muon``, whether each parameter is in a block; by default all are. For bitsandbytes' 8 bits, whether
            its states are in fp32 at any size; by default none are.
    """
    name = setup.optimizer
    if name in EIGHT_BITS:
        return _bitsandbytes(forms, bits=8, paged=name.endswith("paged"), wide=marks)
    if name in _FORMULAS:
        return _FORMULAS[name](forms)
    if name == "muon":
        matrices = [
            len(shape) == 2 and within for (shape, _), within in zip(forms, marks or [True] * len(forms), strict=True)
        ]
        rest = tuple(form for form, is_matrix in zip(forms, matrices, strict=True) if not is_matrix)
        muon = _one_by_one([form for form, is_matrix in zip(forms, matrices, strict=True) if is_matrix], setup, cuda)
        return OptimizerTrace((*_fused(rest).states, *muon.states), muon.events)
    few = tuple(form for at, form in enumerate(forms) if forms[:at].count(form) < 2)
    if len(few) < len(forms) and cuda and name != "adafactor":
        found = _repeated(_step(few, setup, cuda), few, forms)
        if found is not None:
            return found
    return _step(forms, setup, cuda)


def _one_by_one(forms: Sequence[Form], setup: Setup, cuda: bool) -> OptimizerTrace:
    """A step that handles one parameter after another: the step of each form is copied for every parameter of it."""
    known = {form: _step([form], setup, cuda) for form in dict.fromkeys(forms)}
    states: list[Storage] = []
    events: list[Event] = []
    for form in forms:
        copies = {each: replace(each) for each in (event.storage for event in known[form].events)}
        states += map(replace, known[form].states)
        events += (Event(copies[event.storage], event.allocated, event.moment) for event in known[form].events)
    return OptimizerTrace(tuple(states), tuple(events))


def _repeated(traced: OptimizerTrace, few: Sequence[Form], forms: Sequence[Form]) -> OptimizerTrace | None:
    """The trace for all `forms`, from the trace for `few` of them, at most two of each. A foreach step allocates and
    frees lists with a tensor for every parameter of a dtype; None if this step differs."""
    each = len(traced.states) // len(few)
    states = {form: traced.states[at * each : at * each + each] for at, form in enumerate(few)}
    events: list[Event] = []
    lists: dict[Storage, tuple[list[Storage], list[Storage]]] = {}
    left = list(traced.events)
    while left:
        first = left[0]
        mine, every = ([form for form in those if _named(form[1]) == first.storage.dtype] for those in (few, forms))
        given = [event.storage for event in left[: len(mine)] if event.allocated == first.allocated]
        if first.allocated:
            if not mine or [storage.shape for storage in given] != [shape for shape, _ in mine]:
                return None
            like = dict(zip(mine, given, strict=True))
            lists[given[0]] = lists[given[-1]] = given, [replace(like[form]) for form in every]
        known, made = lists.get(first.storage, ([], []))
        if given not in (known, known[::-1]):
            return None
        those = made if given == known else made[::-1]
        events += (Event(storage, first.allocated, "optimizer step") for storage in those)
        del left[: len(mine)]
    return OptimizerTrace(tuple(state for form in forms for state in map(replace, states[form])), tuple(events))


def _step(forms: Sequence[Form], setup: Setup, cuda: bool) -> OptimizerTrace:
    empty = (torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in forms)
    parameters = nn.ParameterList(map(nn.Parameter, empty))
    optimizer = make_optimizer(parameters, setup, foreach=cuda)
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()  # makes the states
    states = tuple(_states(optimizer, cuda=cuda))
    with _Allocations() as step:
        optimizer.step()
    return OptimizerTrace((*states, *step.living.values()), step.freed())


class _Allocations(TracingMode):
    """Records the storages that operations inside allocate, and their frees; tensors may be on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.living: dict[int, Storage] = {}
        self._watched: set[weakref.ref[torch.UntypedStorage]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given: set[int] | None = None
        for output in tensors_in(result):
            storage = output.untyped_storage()
            address = storage_id(storage)
            if address in self.living:
                continue
            given = given or {storage_id(each.untyped_storage()) for each in tensors_in((args, kwargs))}
            if address not in given:
                self._record(storage, address, _transient(output, operator_schema(func).name.removeprefix("aten::")))
        return result

    def _record(self, storage: torch.UntypedStorage, address: int, made: Storage) -> None:
        def died(reference: weakref.ref[torch.UntypedStorage]) -> None:
            del self.living[address]
            self.events.append(Event(made, False, "optimizer step"))
            self._watched.discard(reference)

        self.living[address] = made
        self.events.append(Event(made, True, "optimizer step"))
        self._watched.add(weakref.ref(storage, died))

    def freed(self) -> tuple[Event, ...]:
        """The events of the storages that have been freed."""
        kept = set(self.living.values())
        return tuple(event for event in self.events if event.storage not in kept)


def _transient(tensor: Tensor, operation: str) -> Storage:
    nbytes = tensor.untyped_storage().nbytes()
    return Storage(nbytes, "optimizer transients", "", operation, _named(tensor.dtype), tuple(tensor.shape))


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def make_optimizer(parameters: Sequence[nn.Parameter] | nn.ParameterList, setup: Setup, *, foreach: bool) -> Any:
    """The optimizer of `setup`, which must be one of PyTorch's or transformers'."""
    if setup.optimizer == "adamw-fused":
        return torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    if setup.optimizer == "muon":
        return torch.optim.Muon(parameters, lr=1e-3)
    if setup.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=1e-3, foreach=foreach)
    if setup.optimizer == "adafactor":
        from transformers.optimization import Adafactor

        # The arguments that Trainer passes.
        return Adafactor(parameters, lr=1e-3, scale_parameter=False, relative_step=False)
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=foreach)


def _states(optimizer: Any, *, cuda: bool) -> Iterator[Storage]:
    seen: set[int] = set()
    for leaf in tree_leaves(list(optimizer.state.values())):
        if not isinstance(leaf, Tensor) or (cuda and not leaf.dim()):  # step counters stay on the CPU
            continue
        storage = leaf.untyped_storage()
        if storage_id(storage) not in seen:
            seen.add(storage_id(storage))
            yield _state(storage.nbytes(), _named(leaf.dtype), tuple(leaf.shape))


def _fused(forms: Sequence[Form]) -> OptimizerTrace:
    """torch/optim/adam.py: the step counters are on the device too."""
    states = []
    for shape, dtype in forms:
        states += [_state(prod(shape) * dtype.itemsize, _named(dtype), shape) for _ in range(2)]
        states.append(_state(4, "float32", ()))
    return OptimizerTrace(tuple(states), ())


def _bitsandbytes(
    forms: Sequence[Form], *, bits: int, paged: bool, wide: Sequence[bool] | None = None
) -> OptimizerTrace:
    states = []
    for (shape, _), is_wide in zip(forms, wide or [False] * len(forms), strict=True):
        count = prod(shape)
        in_fp32 = count < _LEAST_8BIT or bits == 32 or is_wide
        for _ in range(2):
            if not (paged and count >= _LEAST_PAGED):
                states.append(_state(4 * count, "float32", shape) if in_fp32 else _state(count, "uint8", shape))
            if not in_fp32:
                blocks = -(-count // _BLOCK)
                states.append(_state(4 * blocks, "float32", (blocks,)))
    if bits == 8:
        states += [_state(4 * _MAP, "float32", (_MAP,)) for _ in range(2)]
    return OptimizerTrace(tuple(states), ())


def _torchao(forms: Sequence[Form], *, bits: int) -> OptimizerTrace:
    """torchao/optim/subclass_8bit.py, subclass_4bit.py; each state has a map from codes to values of its own. The step
    is compiled for each tensor. Its allocations are those of the code that the compiler makes for a CPU."""
    states: list[Storage] = []
    events: list[Event] = []
    for shape, dtype in forms:
        count = prod(shape)
        if count < _LEAST_8BIT or count % _BLOCK:
            states += [_state(count * dtype.itemsize, _named(dtype), shape) for _ in range(2)]
            continue
        for _ in range(2):
            states.append(_state(count * bits // 8, "uint8", shape))
            states.append(_state(4 * count // _BLOCK, "float32", (count // _BLOCK,)))
            states.append(_state(4 << bits, "float32", (1 << bits,)))
        made = [Storage(size * count, "optimizer transients", "", "compiled step") for size in _COMPILED[bits]]
        events += [Event(each, True, "optimizer step") for each in made]
        events += [Event(each, False, "optimizer step") for each in made]
    return OptimizerTrace(tuple(states), tuple(events))


#: Bits of the states -> bytes per element of each buffer that lives at once in torchao's compiled step.
_COMPILED = {8: (4, 4), 4: (1, 1, 4, 4, 8, 8)}


def _flash(forms: Sequence[Form]) -> OptimizerTrace:
    """flashoptim/optimizers.py: codes of both states, and 8 bits more for each 16-bit weight (24-bit weights)."""
    states = []
    for shape, dtype in forms:
        count = prod(shape)
        groups = -(-count // _GROUP)
        for kind in ("int8", "uint8"):
            states += [_state(count, kind, shape), _state(2 * groups, "float16", (groups,))]
        if dtype.itemsize == 2:
            states.append(_state(count, "int8", shape))
    return OptimizerTrace(tuple(states), ())


_FORMULAS: dict[str, Callable[[Sequence[Form]], OptimizerTrace]] = {
    "adamw-fused": _fused,
    "adamw-paged": partial(_bitsandbytes, bits=32, paged=True),
    "adamw-offload": lambda forms: _fused([form for form in forms if prod(form[0]) < _LEAST_OFFLOADED]),
    "adamw8bit-torchao": partial(_torchao, bits=8),
    "adamw4bit-torchao": partial(_torchao, bits=4),
    "flash-adamw": _flash,
}
#: Optimizers whose steps can be run to measure them.
RUN = ("adamw-fused", "adamw-foreach", "sgd", "adafactor")


def _state(nbytes: int, dtype: str, shape: tuple[int, ...]) -> Storage:
    return Storage(nbytes, "optimizer states", "", "", dtype, shape)
