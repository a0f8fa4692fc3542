"""Linears whose output is recomputed: the module runs again in backward, from its input.

The whole module runs again, adapters and quantised weights included, with autocast and the random numbers of the
forward. If that cannot be repeated, the output is saved as usual.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils.checkpoint import checkpoint

from memopt.kernels.base.autograd import autocast_dtype
from memopt.kernels.linear.function import recomputed_output
from memopt.patches.rerun import (
    OF_EVERY_MODULE,
    WEIGHTS,
    Around,
    HookTable,
    has_gradient,
    have_moved,
    hooks_as_before,
    is_on_gpu,
    random_states,
    tables_of_hooks,
)
from memopt.patches.scope import ScopeRewrite
from memopt.patches.swap import Notes, is_swapped, is_watched, parameters_of, steps_aside, swap_forward, swap_state
from memopt.patches.unseen import Values
from memopt.recompute.specs import shared_cast, spec_of
from memopt.recompute.versions import with_witness
from memopt.saved.scope import in_a_scope
from memopt.torch_compat import FakeTensor, fsdp_takes_back, is_checkpointed_region, module_hooks, modules_that_run
from memopt.walk.probes.linear import is_linear

_WHY = ", since the module's output is recomputed. Change weights after backward"


class _Notes(Notes):
    """Notes on the first run of a module."""

    def __init__(self) -> None:
        self.is_compared = False
        self.changes_state = False
        """Whether its forward changes tensors of the module in a way that their versions do not show."""


@dataclass(frozen=True)
class OutputRewrite:
    """State of a linear whose output is recomputed."""

    input_is_saved: bool
    """Another operation saves its input, or the tensors that the input is recomputed from."""
    casts: bool = False
    """It is one linear, whose input autocast casts."""
    notes: _Notes = field(default_factory=_Notes, compare=False, repr=False)


def patch_output(module: nn.Module, *, input_is_saved: bool) -> None:
    """Let readers of the output of `module` (a linear, perhaps with adapters) recompute it. `input_is_saved` tells
    whether its input is saved even if its own weight is frozen."""
    weight = module._parameters.get("weight")
    # Weights of integers are quantised: their linears cast as `F.linear` does.
    casts = weight is not None and (
        not weight.is_floating_point() or is_linear(module) or is_linear(module, transposed=True)
    )
    swap_forward(module, _forward, OutputRewrite(input_is_saved, casts))


class _Running(threading.local):
    """In this thread: the module that is called again, the input of its forward, and the output of that call."""

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
    weight = parameters_of(module).get("weight")
    if rewrite.casts:  # a linear itself: no adapter inside reads `x` before the cast
        x = shared_cast(x, autocast_dtype)
    is_saved = (rewrite.input_is_saved and x.requires_grad) or (weight is not None and weight.requires_grad)
    if is_saved and torch.compiler.is_dynamo_compiling() and torch.is_grad_enabled():
        # In a checkpointed region, the partitioner saves no result, so it recomputes the output.
        return checkpoint(functools.partial(stock, module), x, use_reentrant=False)
    if steps_aside() or not in_a_scope() or is_checkpointed_region():  # there it would run three times
        return stock(module, x)
    if not is_saved or not _may_run_again(module) or (is_on_gpu(x) and torch.cuda.is_current_stream_capturing()):
        return stock(module, x)
    if torch.distributed.is_available() and torch.distributed.is_initialized() and _frees_its_weights():
        return stock(module, x)
    if rewrite.casts and weight is not None and weight.requires_grad:
        x = _as_saved(x)
    around = Around.of(module, x)
    hooks = tuple((table, dict(table)) for table in tables_of_hooks((module,))) if is_watched(module) else ()
    may_draw = module.training and bool(module._modules)
    random = random_states(x) if may_draw else ()
    notes = rewrite.notes
    state = Values(() if notes.is_compared else around.held.state)
    y = stock(module, x)
    if not notes.is_compared:  # once, since a comparison waits for the device
        notes.is_compared, notes.changes_state = True, bool(state.changed())
    if type(y) not in (Tensor, FakeTensor) or not y.requires_grad or y is x or y._version:
        return y
    if notes.changes_state or around.held.has_moved:
        return y
    if may_draw and not have_moved(random, x):
        random = ()
    return with_witness(recomputed_output(y, x, _Again(stock, module, around, random, hooks)))


def _as_saved(x: Tensor) -> Tensor:
    """`x`, or the cast of it that autocast saves for the weight: stock allows changes in place of `x` itself."""
    dtype = None if spec_of(x) is not None else autocast_dtype(x)
    return x if dtype is None or x.dtype is torch.float64 else x.to(dtype)


def _frees_its_weights() -> bool:
    """Whether the running linear is of an FSDP2 unit inside of its block, such as an MLP: a reader of the output in
    another unit runs backward when this unit has no whole weights."""
    unit = next(filter(fsdp_takes_back, modules_that_run()), None)
    state = swap_state(unit) if unit is not None and is_swapped(unit) else None
    return unit is not None and not (isinstance(state, ScopeRewrite) or hasattr(state, "is_checkpointed"))


@dataclass(frozen=True, eq=False)
class _Again:
    """Runs the module's forward again, under the conditions of its first run."""

    stock: Callable[..., Tensor]
    module: nn.Module
    around: Around
    random: tuple[Tensor, ...]
    """States of the generators before the forward; empty if it drew no random number."""
    hooks: tuple[tuple[HookTable, dict[int, Any]], ...]
    """The module's hooks in the first run; empty if nothing watched it. Hooks that were added since do not run."""

    def __call__(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(x.is_floating_point())  # some modules choose a kernel by `requires_grad`
        is_hooked = any(map(is_watched, self.module.modules()))
        random = self.random or (random_states(x) if is_hooked else ())  # hooks may draw numbers too
        # Hooks may need outputs that have a grad_fn.
        with self.around.again(x, random, _WHY), torch.set_grad_enabled(is_hooked):
            return self._run(x).detach()

    def _run(self, x: Tensor) -> Tensor:
        if not self.hooks:
            return self.stock(self.module, x)
        # Hooks run again too, as under activation checkpointing, since they may gather sharded weights. The forward
        # takes its first input again and its own output is used, so hooks do not change input and output twice.
        _running.module, _running.x = self.module, x
        try:
            with hooks_as_before(self.hooks):
                self.module(x)
            return _running.y
        finally:
            _running.module = None
            _running.__dict__.pop("y", None)
            del _running.x


def _may_run_again(module: nn.Module) -> bool:
    return not any(
        # A tool that replaces the forward of an instance (offloading) may load the weights only during its calls.
        "forward" in vars(each)
        or "parametrizations" in each._modules
        # Every run of the hook of torch.nn.utils.spectral_norm makes a step of power iteration.
        or any(isinstance(hook, SpectralNorm) for hook in module_hooks(each)[1].values())
        # The second run cannot have it back: it may hold the graph of the last call.
        or any(has_gradient(vars(each)[name]) for name in vars(each).keys() - OF_EVERY_MODULE - set(WEIGHTS))
        for each in module.modules()
    )
