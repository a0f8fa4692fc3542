"""Linears whose output is recomputed: the module runs again in backward, from its input.

What runs again is the whole module, adapters and quantised weights included, with autocast and the random numbers of
the forward. Where that cannot be repeated its output is saved as usual.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils.checkpoint import checkpoint

from memopt.kernels.base.autograd import autocast_as, autocast_dtype
from memopt.kernels.linear.output import recomputed_output
from memopt.patches.repeated import RepeatedMode, Slot, active_modes, has_memory, inside, modes_of, standing
from memopt.patches.swap import is_watched, steps_aside, swap_forward
from memopt.recompute.specs import shared_cast
from memopt.recompute.versions import with_witness
from memopt.saved.scope import in_a_scope
from memopt.torch_compat import FakeTensor, is_checkpointed_region, module_hooks, no_dispatch


@dataclass(frozen=True)
class OutputRewrite:
    """What a linear knows whose output is recomputed."""

    input_is_saved: bool
    """Somebody else saves its input, or what the input is recomputed from."""


def patch_output(module: nn.Module, *, input_is_saved: bool) -> None:
    """Let readers of the output of `module` recompute it.

    Args:
        module: takes one tensor and returns one: a linear, perhaps with adapters.
        input_is_saved: its input is saved also where its own weight is frozen.

    Raises:
        ValueError: the module cannot be swapped.
    """
    swap_forward(module, _forward, OutputRewrite(input_is_saved))


class _Running(threading.local):
    """Of this thread: the module that it calls again, the input of its forward, and the output that it computed."""

    module: nn.Module | None = None
    x: Tensor
    y: Tensor


_running = _Running()


def _forward(stock: Callable[..., Any], rewrite: OutputRewrite, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if _running.module is module:
        _running.y = stock(module, _running.x)
        return _running.y
    given = (*args, *kwargs.values())
    is_one = len(given) == 1 and isinstance(given[0], Tensor)
    if not is_one:
        return stock(module, *args, **kwargs)
    x: Tensor = given[0]
    weight = module._parameters.get("weight")
    if weight is not None:  # no adapter reads it before it is cast
        x = shared_cast(x, autocast_dtype)
    is_saved = (rewrite.input_is_saved and x.requires_grad) or (weight is not None and weight.requires_grad)
    if is_saved and torch.compiler.is_dynamo_compiling() and torch.is_grad_enabled():
        # The partitioner takes a checkpointed region for an order: it saves no result of it.
        return checkpoint(functools.partial(stock, module), x, use_reentrant=False)
    if steps_aside() or not in_a_scope() or is_checkpointed_region():  # that would compute it three times
        return stock(module, x)
    # A tool that exchanges the forward of an instance (offloading) brings the weights for the time of a call.
    if not is_saved or _is_wrapped(module) or (_is_on_gpu(x) and torch.cuda.is_current_stream_capturing()):
        return stock(module, x)
    held, autocast = _tensors(module), autocast_dtype(x)
    versions = _versions(held)
    may_draw = module.training and bool(module._modules)
    random = _random_states(x) if may_draw else ()
    y = stock(module, x)
    if (
        type(y) not in (Tensor, FakeTensor)
        or not y.requires_grad
        or y is x
        or y._version
        or versions != _versions(_tensors(module))
    ):
        return y
    if may_draw and not _have_moved(random, x):
        random = ()
    return with_witness(
        recomputed_output(
            y, x, _Again(stock, module, held, versions, modes_of(module), autocast, random, active_modes())
        )
    )


@dataclass(frozen=True, eq=False)
class _Again:
    """The module's forward, as it ran."""

    stock: Callable[..., Tensor]
    module: nn.Module
    held: dict[str, Tensor]
    """Parameters and buffers by name: `torch.func.functional_call` puts others in for the time of a forward."""
    versions: list[int]
    modes: list[tuple[Slot, Any]]
    autocast: torch.dtype | None
    random: tuple[Tensor, ...]
    """States of the generators that it drew from; empty where it drew nothing."""
    around: tuple[type[RepeatedMode], ...]

    def __call__(self, x: Tensor) -> Tensor:
        now = _tensors(self.module)
        # Sharding frees the weights of the forward: then those that were gathered since are the same.
        exchanged = {name: t for name, t in self.held.items() if now.get(name) is not t and has_memory(t)}
        versions = _versions({**now, **exchanged})
        if versions != self.versions:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"parameter or buffer of {type(self.module).__name__} is at version {versions}; expected version "
                f"{self.versions} instead, since its output is recomputed. Change weights after backward."
            )
        x = x.detach().requires_grad_(x.is_floating_point())  # kernels for inference ask for that
        is_hooked = any(map(is_watched, self.module.modules()))
        random = self.random or (_random_states(x) if is_hooked else ())  # hooks may draw too
        with (
            autocast_as(self.autocast, x),
            _drawing_from(random, x),
            standing(self.modes),
            torch.set_grad_enabled(is_hooked),  # hooks may ask for the place of an output in a graph
            inside(self.around),
        ):
            return self._run(x, exchanged).detach()

    def _run(self, x: Tensor, exchanged: dict[str, Tensor]) -> Tensor:
        if not exchanged and not is_watched(self.module):
            return self.stock(self.module, x)
        # Hooks run again too, as under activation checkpointing: they may be those that gather sharded weights. Their
        # changes of input and output are not made twice.
        _running.module, _running.x = self.module, x
        try:
            torch.func.functional_call(self.module, exchanged, (x,)) if exchanged else self.module(x)
            return _running.y
        finally:
            _running.module = None
            _running.__dict__.pop("y", None)
            del _running.x


def _is_wrapped(module: nn.Module) -> bool:
    return any(
        "forward" in vars(each)
        or "parametrizations" in each._modules
        # The hook of torch.nn.utils.spectral_norm: every run of it is a step of a power iteration.
        or any(isinstance(hook, SpectralNorm) for hook in module_hooks(each)[1].values())
        for each in module.modules()
    )


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Its parameters and buffers."""
    if module._modules:
        return {**dict(module.named_parameters()), **dict(module.named_buffers())}
    own = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in own.items() if tensor is not None}


def _versions(tensors: dict[str, Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors.values()]


def _is_on_gpu(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_available()  # a fake tensor needs no device


def _random_states(x: Tensor) -> tuple[Tensor, ...]:
    """Of the generators that a module may draw from: seeds come from the CPU's."""
    with no_dispatch():  # real ones under fake tensors too
        cpu = torch.get_rng_state()
        return (cpu, torch.cuda.get_rng_state(x.device)) if _is_on_gpu(x) else (cpu,)


def _have_moved(states: tuple[Tensor, ...], x: Tensor) -> bool:
    with no_dispatch():
        return not all(map(torch.equal, states, _random_states(x)))


@contextmanager
def _drawing_from(states: tuple[Tensor, ...], x: Tensor) -> Iterator[None]:
    """Inside, generators give the numbers that they gave in forward; afterwards they are as they were."""
    if not states:
        yield
        return
    before = _random_states(x)
    try:
        _set_random_states(states, x)
        yield
    finally:
        _set_random_states(before, x)


def _set_random_states(states: tuple[Tensor, ...], x: Tensor) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1], x.device)
