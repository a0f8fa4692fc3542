"""Is the forward of a gated MLP down(act(gate(x)) * up(x)) and nothing else? Answered by running a copy of it.

The copy shares the module's code and attributes; its linears are replaced by tiny random ones, so no weight is read
and the answer takes a millisecond at any size.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from memopt.kernels.formulas import ACTIVATIONS
from memopt.walk.elementwise import probe_activation
from memopt.walk.sites import GatedForm, GatedMLPSite
from memopt.walk.stand_ins import Marker, linear, run

_HIDDEN, _INTERMEDIATE = 6, 10
#: Pre-activations reach about this far, so that limits and clamps show.
_RANGE = 30.0


def with_form(model: nn.Module, site: GatedMLPSite) -> GatedMLPSite:
    """`site` with its `form` and `between` filled in, where its module does what they say and nothing else.

    The module may have the linears, one activation and one child between the product and down (a dropout); one with
    parameters, buffers or children beside these keeps the form None.
    """
    module = model.get_submodule(site.name)
    names = site.children
    if names is None or site.activation not in ACTIVATIONS or _has_tensors(module):
        return site
    others = [name for name, child in module.named_children() if name not in names and probe_activation(child) is None]
    if len(others) > 1 or len(list(module.children())) > len(set(names)) + len(others) + 1:
        return site
    candidate = replace(site, between=others[0] if others else None)
    forms: tuple[GatedForm, ...] = ("gate_up", "up_gate") if site.gate == site.up else ("separate",)
    return next((replace(candidate, form=form) for form in forms if _does(module, candidate, names, form)), site)


def _has_tensors(module: nn.Module) -> bool:
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return len(own) > 0


@torch.no_grad()
def _does(module: nn.Module, site: GatedMLPSite, names: tuple[str, str, str], form: GatedForm) -> bool:
    """Whether `module`, with stand-ins for its linears, computes what `form` says, in eval and in train mode."""
    generator = torch.Generator().manual_seed(0)
    gate, up, down = names
    width = _INTERMEDIATE if form == "separate" else 2 * _INTERMEDIATE
    stand_ins: dict[str, nn.Module] = {name: linear(_HIDDEN, width, generator) for name in dict.fromkeys((gate, up))}
    stand_ins[down] = linear(_INTERMEDIATE, _HIDDEN, generator)
    if site.between is not None:
        stand_ins[site.between] = Marker()
    x = torch.randn(2, 5, _HIDDEN, generator=generator, dtype=torch.float64) * (_RANGE / _HIDDEN**0.5)
    if form == "separate":
        z, factor = stand_ins[gate](x), stand_ins[up](x)
    else:
        halves = stand_ins[gate](x).chunk(2, dim=-1)
        z, factor = halves if form == "gate_up" else halves[::-1]
    h = ACTIVATIONS[site.activation](z) * factor
    if site.between is not None:
        h = stand_ins[site.between](h)
    expected = stand_ins[down](h)
    outputs = [run(module, stand_ins, lambda m: m.forward(x.clone()), training=training) for training in (False, True)]
    return all(
        y is not None and y.shape == x.shape and torch.allclose(y, expected, rtol=1e-9, atol=1e-9) for y in outputs
    )
