"""One model, probed and watched: which norms and activations it has, and what every call of it did.

What the records mean for a fold is `memopt.walk.folds`; what they become for a user, `memopt.walk.observe`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memopt.walk.aten.precision import default_float64
from memopt.walk.calls.inputs import Call
from memopt.walk.calls.parts import every_call
from memopt.walk.flow.holders import Held, input_holders
from memopt.walk.flow.origins import Labels
from memopt.walk.flow.shadow import ShadowMode
from memopt.walk.probes.probe import NormProbe, probe_activation, probe_norm


@dataclass
class Observed:
    mode: ShadowMode
    labels: Labels | None
    lookalikes: dict[str, str]
    calls: Sequence[Call]
    traces: list[tuple[str, str]]
    held_by: Mapping[str, Held]
    """Weight of a linear -> what else keeps its input for backward; without those of which that is not known."""


def observe(model: nn.Module, inputs: Mapping[str, Any] | None = None, *, with_labels: bool) -> Observed:
    """Probe the modules of `model`, then watch every call that runs, in eval and in train mode.

    With labels, one more forward asks autograd who keeps the linears' inputs.
    """
    norms, lookalikes, activations = _probe_all(model)
    labels = Labels(model, activations) if with_labels else None
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    mode = ShadowMode(model, norms, labels, float64=not on_meta)
    # A second run in a row sees a tensor that the first one left on a module. Numbers only: the twin is cheap.
    repeats = 1 if on_meta else 2

    def run(target: nn.Module, call: Call) -> Any:
        mode.forget()
        return [mode.run(target, call) for _ in range(repeats)][-1]

    with plain_torch(float64=not on_meta):
        with mode.watch():
            calls = every_call(model, inputs, run=run)
        weights = [linear.parameter for linear in labels.linear_sites()] if labels is not None else []
        held_by = input_holders(model, calls, weights, mode.parameters)
    traces = [*((call.label, "ok") for call in calls), *calls.errors]
    return Observed(mode, labels, lookalikes, calls, traces, held_by)


def _probe_all(model: nn.Module) -> tuple[dict[str, NormProbe], dict[str, str], dict[str, Any]]:
    """(norms, reasons of modules that only look like one, activations), by module name."""
    cache: dict[Any, Any] = {}
    norms: dict[str, NormProbe] = {}
    lookalikes: dict[str, str] = {}
    activations = {}
    for name, module in model.named_modules():
        norm = probe_norm(module, name, cache)
        if isinstance(norm, NormProbe):
            norms[name] = norm
        elif norm is not None:
            lookalikes[name] = norm
        elif (activation := probe_activation(module, cache)) is not None:
            activations[name] = activation
    return norms, lookalikes, activations


@contextlib.contextmanager
def plain_torch(float64: bool) -> Iterator[None]:
    """No fused encoder fast path, which would hide a layer in one op; doubles by default where wanted."""
    before, is_enabled = torch.backends.mha.get_fastpath_enabled(), torch.is_autocast_enabled

    def is_enabled_anywhere(*device: Any) -> bool:
        # Older models ask this of the device of their inputs, and torch knows no autocast on meta.
        return device != ("meta",) and is_enabled(*device)

    torch.backends.mha.set_fastpath_enabled(False)
    torch.is_autocast_enabled = is_enabled_anywhere  # type: ignore[assignment]
    try:
        with default_float64() if float64 else contextlib.nullcontext():
            yield
    finally:
        torch.is_autocast_enabled = is_enabled
        torch.backends.mha.set_fastpath_enabled(before)
