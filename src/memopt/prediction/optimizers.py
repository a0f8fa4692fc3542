"""What an optimizer keeps between steps, and what its step allocates: by running it, on tensors without data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from memopt.prediction.events import Event, Storage
from memopt.prediction.setup import Setup
from memopt.reporting.storages import storages
from memopt.reporting.timeline import Timeline
from memopt.torch_compat import FakeTensorMode, storage_id, tree_leaves

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
    with FakeTensorMode(allow_non_fake_inputs=True):
        parameters = nn.ParameterList(nn.Parameter(torch.empty(shape, dtype=dtype)) for shape, dtype in forms)
        optimizer = make_optimizer(parameters, setup, foreach=cuda)
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()  # makes the states
        states = tuple(_states(optimizer, cuda=cuda))
        timeline = Timeline(parameters)
        with timeline:
            optimizer.step()
    made: dict[Any, Storage] = {}
    events = []
    for index, life in enumerate(timeline.events):
        birth = life.birth
        if life.born == index:
            made[life] = Storage(life.nbytes, "optimizer transients", "", birth.operation, birth.dtype, birth.shape)
        events.append(Event(made[life], life.born == index, "optimizer step"))
    kept = [storage for life, storage in made.items() if life.died < 0]
    return OptimizerTrace((*states, *kept), tuple(event for event in events if event.storage not in kept))


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
        for storage in storages([leaf]):
            if storage_id(storage) not in seen:
                seen.add(storage_id(storage))
                yield _state(storage.nbytes(), str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape))


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
