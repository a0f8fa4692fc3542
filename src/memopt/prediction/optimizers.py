"""What an optimizer keeps between steps, and what its step allocates: by running it, on tensors without data."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from memopt.prediction.setup import Setup
from memopt.torch_compat import FakeTensorMode, TorchDispatchMode, operator_schema, storage_id, tree_leaves
from memopt.trace.events import Event, Storage
from memopt.trace.storages import tensors

#: bitsandbytes/optim/optimizer.py: blocks of a statistic, the least elements of a tensor whose states have 8 bits, and
#: the entries of each of its two maps from codes to values.
_BLOCK, _LEAST_8BIT, _MAP = 256, 4096, 256
#: Shape and dtype of a parameter.
Form = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class OptimizerTrace:
    """What an optimizer needs from its second step on."""

    states: tuple[Storage, ...]
    """Kept between steps."""
    events: tuple[Event, ...]
    """Of one step; what it allocates it frees."""


@lru_cache(maxsize=32)
def follow(forms: tuple[Form, ...], setup: Setup, cuda: bool = True) -> OptimizerTrace:
    """Follow a step of the optimizer of `setup` over parameters of these `forms`.

    Args:
        forms: of the trained parameters, each once.
        setup: its `optimizer`, `fused` and `momentum` are read.
        cuda: PyTorch then runs foreach by default, and a parameter after the other on the CPU.
    """
    if setup.optimizer == "adamw8bit":
        return OptimizerTrace(tuple(_states_8bit(forms)), ())
    few = tuple(form for at, form in enumerate(forms) if forms[:at].count(form) < 2)
    if len(few) < len(forms) and cuda and not setup.fused and setup.optimizer != "adafactor":
        found = _repeated(_step(few, setup, cuda), few, forms)
        if found is not None:
            return found
    return _step(forms, setup, cuda)


def _repeated(traced: OptimizerTrace, few: Sequence[Form], forms: Sequence[Form]) -> OptimizerTrace | None:
    """The trace over `forms` from that over `few` of them, two of each.

    A foreach step allocates and frees lists, of all parameters of one dtype; None if this one does anything else.
    """
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
    # Fused steps refuse the meta device; under a fake mode every operation takes several times as long.
    device, fake = ("cpu", FakeTensorMode()) if setup.fused else ("meta", contextlib.nullcontext())
    with fake:
        empty = (torch.empty(shape, dtype=dtype, device=device) for shape, dtype in forms)
        parameters = nn.ParameterList(map(nn.Parameter, empty))
        optimizer = make_optimizer(parameters, setup, foreach=cuda)
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()  # makes the states
        states = tuple(_states(optimizer, cuda=cuda))
        with _Allocations() as step:
            optimizer.step()
    return OptimizerTrace((*states, *step.living.values()), step.freed())


class _Allocations(TorchDispatchMode):
    """Records what the operations inside allocate, and when that is freed; tensors may be on the meta device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self.living: dict[int, Storage] = {}
        self._watched: set[weakref.ref[torch.UntypedStorage]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given: set[int] | None = None
        for output in tensors(result):
            storage = output.untyped_storage()
            address = storage_id(storage)
            if address in self.living:
                continue
            given = given or {storage_id(each.untyped_storage()) for each in tensors((args, kwargs))}
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
        """The events of what does not live on."""
        kept = set(self.living.values())
        return tuple(event for event in self.events if event.storage not in kept)


def _transient(tensor: Tensor, operation: str) -> Storage:
    nbytes = tensor.untyped_storage().nbytes()
    return Storage(nbytes, "optimizer transients", "", operation, _named(tensor.dtype), tuple(tensor.shape))


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def make_optimizer(parameters: Sequence[nn.Parameter] | nn.ParameterList, setup: Setup, *, foreach: bool) -> Any:
    """The optimizer of `setup`, but for ``adamw8bit``."""
    ways: dict[str, Any] = {"fused": True} if setup.fused else {"foreach": foreach}
    if setup.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=1e-3, momentum=setup.momentum, **ways)
    if setup.optimizer == "adafactor":
        from transformers.optimization import Adafactor

        # As Trainer makes it.
        return Adafactor(parameters, lr=1e-3, scale_parameter=False, relative_step=False)
    return torch.optim.AdamW(parameters, lr=1e-3, **ways)


def _states(optimizer: Any, *, cuda: bool) -> Iterator[Storage]:
    seen: set[int] = set()
    for leaf in tree_leaves(list(optimizer.state.values())):
        # Numbers of steps stay on the CPU, unless the optimizer is fused.
        if not isinstance(leaf, Tensor) or (cuda and not leaf.dim() and not optimizer.defaults.get("fused")):
            continue
        storage = leaf.untyped_storage()
        if storage_id(storage) not in seen:
            seen.add(storage_id(storage))
            yield _state(storage.nbytes(), _named(leaf.dtype), tuple(leaf.shape))


def _states_8bit(forms: Sequence[Form]) -> Iterator[Storage]:
    for shape, _ in forms:
        count = torch.Size(shape).numel()
        for _ in range(2):
            if count < _LEAST_8BIT:
                yield _state(4 * count, "float32", shape)
            else:
                yield _state(count, "uint8", shape)
                blocks = -(-count // _BLOCK)
                yield _state(4 * blocks, "float32", (blocks,))
    for _ in range(2):
        yield _state(4 * _MAP, "float32", (_MAP,))


def _state(nbytes: int, dtype: str, shape: tuple[int, ...]) -> Storage:
    return Storage(nbytes, "optimizer states", "", "", dtype, shape)
