"""Random generators beside PyTorch's own, which no checkpoint function sets back for a second run of a block.

They are Python's and NumPy's, and generators that modules hold as attributes.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

#: How to read the state of a generator, and how to set it.
Generator = tuple[Callable[[], Any], Callable[[Any], Any]]


def generators_of(modules: Iterable[nn.Module]) -> list[Generator]:
    """Python's and NumPy's generators, and those that `modules` hold."""
    held = {id(value): value for module in modules for value in vars(module).values()}
    found = [_state_of(value) for value in held.values()]
    return [(random.getstate, random.setstate), (np.random.get_state, np.random.set_state), *filter(None, found)]


def drew_from(generators: Sequence[Generator], before: Sequence[Any]) -> list[Generator]:
    """The members of `generators` that are no longer in the states `before`."""
    pairs = zip(generators, before, strict=True)
    return [each for each, state in pairs if pickle.dumps(each[0]()) != pickle.dumps(state)]


@contextmanager
def in_states(generators: Sequence[Generator], states: Sequence[Any]) -> Iterator[None]:
    """Inside, `generators` go on from `states`; afterwards from where they were."""
    now = [read() for read, _ in generators]
    try:
        for (_, write), state in zip(generators, states, strict=True):
            write(state)
        yield
    finally:
        for (_, write), state in zip(generators, now, strict=True):
            write(state)


def _state_of(value: Any) -> Generator | None:
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    if isinstance(value, (torch.Generator, np.random.RandomState)):
        return value.get_state, value.set_state
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return partial(getattr, bits, "state"), partial(setattr, bits, "state")
    return None
