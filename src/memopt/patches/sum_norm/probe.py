"""Find modules whose forward is norm(dense(hidden) + residual) and nothing else, by running copies of them.

Blocks of post-norm encoders end with such a module, and only the norm reads the sum. A copy shares the module's code
and attributes. Tiny children replace its own; their output shows any other order, scale or use of the inputs.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from memopt.patches.sum_norm.site import SumNormSite
from memopt.walk.probes.isolate import Marker, Scrambler, random_linear, run_on
from memopt.walk.sites import NormSite, Sites

_WIDTH = 6
_NARROW = (torch.bfloat16, torch.float16)
_RESIDUAL: tuple[Literal[0, 1], ...] = (1, 0)


def find(model: nn.Module, sites: Sites) -> tuple[SumNormSite, ...]:
    """The parents of norms that compute norm(between(dense(hidden)) + residual): each has the norm, one child with
    parameters, at most one without (a dropout), and no tensors of its own."""
    return tuple(site for norm in sites.norms for site in _proved(model, norm))


def _proved(model: nn.Module, norm: NormSite) -> Iterator[SumNormSite]:
    name, _, child = norm.name.rpartition(".")
    if not child:
        return
    module = model.get_submodule(name)
    arguments, children = _two_arguments(module), _dense_and_between(module, child)
    if arguments is None or children is None:
        return
    for residual in _RESIDUAL:
        site = SumNormSite(name, *children, norm=child, arguments=arguments, residual=residual)
        if _does(module, site):
            yield site
            return


def _two_arguments(module: nn.Module) -> tuple[str, str] | None:
    """Names of the forward's arguments; None unless there are two that can be passed by name and by position."""
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        return None
    if len(parameters) != 2 or any(p.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters):
        return None
    return parameters[0].name, parameters[1].name


def _dense_and_between(module: nn.Module, norm: str) -> tuple[str, str | None] | None:
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    children = {name: child for name, child in module._modules.items() if name != norm and child is not None}
    if own or len(children) not in (1, 2):
        return None
    dense = [name for name, child in children.items() if next(child.parameters(), None) is not None]
    between = [name for name in children if name not in dense]
    if len(dense) != 1 or any(next(children[name].buffers(), None) is not None for name in between):
        return None
    return dense[0], between[0] if between else None


def _does(module: nn.Module, site: SumNormSite) -> bool:
    """Whether the forward of `module`, with stand-ins for its children, computes the site's formula: value and
    gradients in fp64, in eval and in train mode, called by position and by name; in 16 bits, the value bit by bit."""
    generator = torch.Generator().manual_seed(0)
    stand_ins: dict[str, nn.Module] = {
        site.dense: random_linear(_WIDTH, _WIDTH, generator),
        site.norm: Scrambler(_WIDTH, generator),
    }
    if site.between is not None:
        stand_ins[site.between] = Marker()
    given = [torch.randn(2, 5, _WIDTH, generator=generator, dtype=torch.float64) for _ in range(2)]

    def formula(_: nn.Module, *inputs: Tensor) -> Any:
        h = stand_ins[site.dense](inputs[1 - site.residual])
        if site.between is not None:
            h = stand_ins[site.between](h)
        return stand_ins[site.norm](h + inputs[site.residual])

    def in_order(alone: nn.Module, *inputs: Tensor) -> Any:
        return alone.forward(*inputs)

    def by_name(alone: nn.Module, *inputs: Tensor) -> Any:
        return alone.forward(**dict(zip(site.arguments, inputs, strict=True)))

    expected = _value_and_gradients(module, stand_ins, formula, given, training=False)
    assert expected is not None
    for call, training in itertools.product((in_order, by_name), (False, True)):
        found = _value_and_gradients(module, stand_ins, call, given, training=training)
        if found is None:
            return False
        if not all(torch.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in zip(found, expected, strict=True)):
            return False
    return all(_rounds_alike(module, stand_ins, in_order, formula, given, dtype) for dtype in _NARROW)


def _rounds_alike(
    module: nn.Module,
    stand_ins: dict[str, nn.Module],
    call: Callable[..., Any],
    formula: Callable[..., Any],
    given: list[Tensor],
    dtype: torch.dtype,
) -> bool:
    """Whether `call` and `formula` agree to the bit in `dtype`; they do not if the forward casts inside."""
    inputs = [x.to(dtype) for x in given]
    for child in stand_ins.values():
        child.to(dtype)
    y = run_on(module, stand_ins, lambda alone: call(alone, *inputs), training=False, native=True)
    return y is not None and torch.equal(y, formula(module, *inputs))


def _value_and_gradients(
    module: nn.Module, stand_ins: dict[str, nn.Module], call: Callable[..., Any], given: list[Tensor], *, training: bool
) -> tuple[Tensor, ...] | None:
    """The output of `call`, its gradient with respect to every input, and the inputs after the call."""
    leaves = [x.clone().requires_grad_() for x in given]
    inputs = [leaf.clone() for leaf in leaves]  # a forward may write into its input, which must not be a leaf then
    # The backward of a forward that overwrites its own saved tensors raises a RuntimeError.
    with torch.enable_grad(), contextlib.suppress(RuntimeError):
        y = run_on(module, stand_ins, lambda alone: call(alone, *inputs), training=training)
        if y is None or y.shape != given[0].shape or not y.requires_grad:
            return None
        weights = torch.arange(1.0, y.numel() + 1, dtype=torch.float64).view(y.shape)
        gradients = torch.autograd.grad((y * weights).sum(), leaves, allow_unused=True, materialize_grads=True)
        return (y.detach(), *gradients, *(x.detach() for x in inputs))
    return None
