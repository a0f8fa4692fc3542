"""Probes the modules of one model for norms and activations, and observes its calls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memopt.walk.aten.precision import default_dtype
from memopt.walk.calls.inputs import Call, Calls
from memopt.walk.calls.parts import every_call
from memopt.walk.flow.branches import Branches
from memopt.walk.flow.caches import CacheReads
from memopt.walk.flow.linear_inputs import InputUse, input_uses
from memopt.walk.flow.origins import Labels
from memopt.walk.flow.shadow import ShadowMode
from memopt.walk.models.plain import exchanged
from memopt.walk.probes.elementwise import probe_activation
from memopt.walk.probes.probe import NO_AFFINE, NormProbe, probe_norm
from memopt.walk.sites import FunctionSite

_DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


@dataclass
class Observed:
    mode: ShadowMode
    lookalikes: dict[str, str]
    calls: Sequence[Call]
    traces: list[tuple[str, str]]
    inputs: Mapping[str, InputUse]
    """Weight of a linear -> other uses of its input; only for linears that ran with gradients."""
    functions: tuple[FunctionSite, ...]
    """Functions that save large intermediates; only functions that ran with gradients."""
    chained: tuple[str, ...]
    """Modules with chains of elementwise operations that save more bytes than the tensors at their start."""
    caches: CacheReads
    unseen: str = ""
    """Why some branch was not observed; empty if every branch was, or if branches were not requested."""


def observe(
    model: nn.Module, inputs: Mapping[str, Any] | None = None, *, with_labels: bool, with_branches: bool = False
) -> Observed:
    """Probe the modules of `model`, then observe every call that runs, in eval and in train mode. With labels, forwards
    with gradients also record which operations save the linears' inputs. With branches, further forwards take the
    branches on values and sizes that no call took; for sizes, calls of other lengths are added."""
    norms, lookalikes, activations = _probe_all(model)
    labels = Labels(model, activations) if with_labels else None
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    mode = ShadowMode(model, norms, labels, float64=not on_meta)
    # On the twin, which is cheap, each call runs twice: the second run may read state that the first left on a module.
    repeats = 1 if on_meta else 2

    def run(target: nn.Module, call: Call) -> Any:
        mode.forget()
        return [mode.run(target, call) for _ in range(1 if branches.exploring else repeats)][-1]

    branches = Branches(run)
    caches = CacheReads(model)
    with plain_torch(float64=not on_meta):
        with mode.watch(), caches.watch():
            calls = every_call(model, inputs, run=branches.run if with_branches else run)
            if with_branches:
                calls = Calls([*calls, *branches.lengths(model, inputs)], calls.errors)
            unseen = branches.take(model)  # empty without branches: `run` noted nothing
        weights = [x.parameter for x in labels.linear_sites() if x.parameter not in labels.hidden] if labels else []
        uses, functions, chained = input_uses(model, calls, weights, mode.parameters)
    traces = [*((call.label, "ok") for call in calls), *calls.errors]
    return Observed(mode, lookalikes, calls, traces, uses, functions, chained, caches, unseen)


def _probe_all(model: nn.Module) -> tuple[dict[str, NormProbe], dict[str, str], dict[str, Any]]:
    """(norms, reasons why modules that look like a norm are none, activations), each by module name."""
    cache: dict[Any, Any] = {}
    norms: dict[str, NormProbe] = {}
    lookalikes: dict[str, str] = {}
    activations = {}
    for name, module in model.named_modules():
        norm = probe_norm(module, cache)
        if isinstance(norm, NormProbe):
            norms[name] = norm
        elif norm is not None:
            lookalikes[name] = norm
        elif (activation := probe_activation(module, cache)) is not None:
            activations[name] = activation
        elif _has_vectors_alone(module):
            lookalikes[name] = NO_AFFINE
    return norms, lookalikes, activations


def _has_vectors_alone(module: nn.Module) -> bool:
    """Whether all parameters are its own and none is a matrix, as in gamma * tanh(alpha * x) + beta."""
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    vectors = all(parameter.dim() < 2 for parameter in own) and any(parameter.numel() > 1 for parameter in own)
    return vectors and len(own) == sum(1 for _ in module.parameters())


@contextlib.contextmanager
def plain_torch(float64: bool) -> Iterator[None]:
    """Disable the fused encoder path, which hides a layer in one op; with `float64`, fp64 is the default dtype."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with autocast_of_meta(), types_of_meta(), default_dtype(torch.float64) if float64 else contextlib.nullcontext():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def autocast_of_meta() -> contextlib.AbstractContextManager[None]:
    """Autocast is off for meta inside; torch raises for meta where models ask for, or leave, autocast of their inputs'
    device."""
    autocast, is_enabled = torch.autocast, torch.is_autocast_enabled
    make = autocast.__init__

    def is_enabled_anywhere(*device: Any) -> bool:
        return device != ("meta",) and is_enabled(*device)

    def of_cpu_for_meta(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        make(self, "cpu" if device_type == "meta" else device_type, *args, **kwargs)

    # Models import the class by its name, so it is changed itself.
    return exchanged([(torch, "is_autocast_enabled", is_enabled_anywhere), (autocast, "__init__", of_cpu_for_meta)])


def types_of_meta() -> contextlib.AbstractContextManager[None]:
    """Inside, ``Tensor.type`` takes the names that it returns for tensors on meta; torch raises for them, and models
    write ``y.type(x.type())``."""
    cast = torch.Tensor.type
    dtypes = {torch.empty(0, dtype=dtype, device="meta").type(): dtype for dtype in _DTYPES}

    def of_meta(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        return self.to("meta", dtypes[dtype]) if dtype in dtypes else cast(self, dtype, *args, **kwargs)

    return exchanged([(torch.Tensor, "type", of_meta)])
