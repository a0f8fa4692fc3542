"""Linears whose output is recomputed: the module runs again in backward, from its input.

What runs again is the whole module, adapters and quantised weights included, with autocast and the random numbers of
the forward. Where that cannot be repeated its output is saved as usual.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils.checkpoint import checkpoint

from memopt.kernels.base.autograd import autocast_dtype
from memopt.kernels.linear.function import recomputed_output
from memopt.patches.rerun import Around, have_moved, is_on_gpu, random_states
from memopt.patches.swap import is_watched, steps_aside, swap_forward
from memopt.recompute.specs import shared_cast
from memopt.recompute.versions import with_witness
from memopt.saved.scope import in_a_scope
from memopt.torch_compat import FakeTensor, is_checkpointed_region, module_hooks

_WHY = ", since the module's output is recomputed. Change weights after backward"


@dataclass(frozen=True)
class OutputRewrite:
    """State of a linear whose output is recomputed."""

    input_is_saved: bool
    """Another operation saves its input, or the tensors that the input is recomputed from."""


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
    if not is_saved or _is_wrapped(module) or (is_on_gpu(x) and torch.cuda.is_current_stream_capturing()):
        return stock(module, x)
    around = Around.of(module, x)
    may_draw = module.training and bool(module._modules)
    random = random_states(x) if may_draw else ()
    y = stock(module, x)
    if type(y) not in (Tensor, FakeTensor) or not y.requires_grad or y is x or y._version or around.held.has_moved:
        return y
    if may_draw and not have_moved(random, x):
        random = ()
    return with_witness(recomputed_output(y, x, _Again(stock, module, around, random)))


@dataclass(frozen=True, eq=False)
class _Again:
    """The module's forward, as it ran."""

    stock: Callable[..., Tensor]
    module: nn.Module
    around: Around
    random: tuple[Tensor, ...]
    """States of the generators that it drew from; empty if it drew nothing."""

    def __call__(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(x.is_floating_point())  # kernels for inference ask for that
        is_hooked = any(map(is_watched, self.module.modules()))
        random = self.random or (random_states(x) if is_hooked else ())  # hooks may draw too
        # Hooks may ask for the place of an output in a graph.
        with self.around.again(x, random, _WHY), torch.set_grad_enabled(is_hooked):
            return self._run(x).detach()

    def _run(self, x: Tensor) -> Tensor:
        if not is_watched(self.module):
            return self.stock(self.module, x)
        # Hooks run again too, as under activation checkpointing: they may be those that gather sharded weights. Their
        # changes of input and output are not made twice.
        _running.module, _running.x = self.module, x
        try:
            self.module(x)
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
