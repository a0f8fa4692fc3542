"""Finds out, by running a copy, whether the forward of a gated MLP is down(act(gate(x)) * up(x)) and nothing else.

The copy shares the module's code and attributes; its linears are replaced by tiny random ones, so no weight is read
and the probe takes a millisecond at any size.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor, nn

from memopt.torch_compat.activations import ACTIVATIONS
from memopt.walk.probes.elementwise import probe_activation
from memopt.walk.probes.isolate import MOST_TOKENS, Marker, is_differentiated, random_linear, run_on
from memopt.walk.sites import GatedForm, GatedMLPSite

_HIDDEN, _INTERMEDIATE = 6, 10
#: Pre-activations reach about this size, so that limits and clamps take effect.
_RANGE = 30.0
_SMALL = 1e-3
_FP64_TOLERANCE = 1e-10
#: Some tens of roundings of the largest of `_INTERMEDIATE` terms: an activation of several steps rounds after each.
_FP16_TOLERANCE = 64 * torch.finfo(torch.float16).eps


def with_form(model: nn.Module, site: GatedMLPSite) -> GatedMLPSite:
    """`site` with its `form`, `act` and `between`, if the module's forward is the formula above and nothing else. It
    may have the linears, one activation and one child between the product and down (a dropout); else `form` stays
    None."""
    module = model.get_submodule(site.name)
    names = site.children
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if names is None or site.activation not in ACTIVATIONS or own or names[2] in names[:2]:
        return site  # a linear that runs twice has no stand-in of one shape
    beside = {name: child for name, child in module._modules.items() if name not in names and child is not None}
    acts = [name for name, child in beside.items() if probe_activation(child) is not None]
    others = [name for name in beside if name not in acts]
    if len(others) > 1 or len(acts) > 1:
        return site
    candidate = replace(site, act=acts[0] if acts else None, between=others[0] if others else None)
    forms: tuple[GatedForm, ...] = ("gate_up", "up_gate") if site.gate == site.up else ("separate",)
    return next((replace(candidate, form=form) for form in forms if _does(module, candidate, names, form)), site)


@torch.no_grad()
def _does(module: nn.Module, site: GatedMLPSite, names: tuple[str, str, str], form: GatedForm) -> bool:
    """Whether `module`, with stand-ins for its linears, computes the formula of `form`: in fp64, in eval and in train
    mode, and in fp16, where a forward may cast or clamp intermediates."""
    generator = torch.Generator().manual_seed(0)
    gate, up, down = names
    width = _INTERMEDIATE if form == "separate" else 2 * _INTERMEDIATE
    stand_ins: dict[str, nn.Module] = {
        name: random_linear(_HIDDEN, width, generator) for name in dict.fromkeys((gate, up))
    }
    stand_ins[down] = random_linear(_INTERMEDIATE, _HIDDEN, generator)
    if site.between is not None:
        stand_ins[site.between] = Marker()
    x = torch.randn(2, 5, _HIDDEN, generator=generator, dtype=torch.float64) * (_RANGE / _HIDDEN**0.5)

    def formula(x: Tensor) -> Tensor:
        if form == "separate":
            z, factor = stand_ins[gate](x), stand_ins[up](x)
        else:
            halves = stand_ins[gate](x).chunk(2, dim=-1)
            z, factor = halves if form == "gate_up" else halves[::-1]
        h = ACTIVATIONS[site.activation].value(z) * factor
        y: Tensor = stand_ins[down](h if site.between is None else stand_ins[site.between](h))
        return y

    def agrees(x: Tensor, tolerance: float, *, training: bool) -> bool:
        y = run_on(
            module, stand_ins, lambda m: m.forward(x.clone()), training=training, native=x.dtype != torch.float64
        )
        expected = formula(x)
        if y is None or y.shape != x.shape or y.dtype != expected.dtype:
            return False
        return bool(((y - expected).abs().max() <= tolerance * expected.abs().max()).item())

    leaves = [x, *(p for child in stand_ins.values() for p in child.parameters())]
    for training in (False, True):
        call = functools.partial(run_on, module, stand_ins, lambda m: m.forward(x.clone()), training=training)
        if not agrees(x, _FP64_TOLERANCE, training=training) or not is_differentiated(call, leaves):
            return False
    x = x.detach()
    tokens = x.flatten(0, 1)[torch.arange(MOST_TOKENS) % 10]
    others = (x * _SMALL, x[:1, :1], tokens[None], tokens[:, None])
    if not all(agrees(each, _FP64_TOLERANCE, training=True) for each in others):  # no branch on lengths or values
        return False
    for child in stand_ins.values():
        child.half()
    return agrees(x.half(), _FP16_TOLERANCE, training=True)
