"""Norm modules that save x_hat instead of their input; the linears that read the norm save the same storage.

A norm whose affine was folded into the next linears has an identity affine. Its weight and bias become persistent
buffers, so they keep their names in every saved checkpoint and are neither trained nor decayed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from memopt.kernels.base.autograd import accumulation_dtype, autocast_dtype
from memopt.kernels.norm.function import NormSpec, affine, ms_norm, normalize
from memopt.patches.identity import Frozen, freezing, local_name, thaw
from memopt.patches.reads import Reads, observed_reads
from memopt.patches.swap import (
    Rewrite,
    is_as_patched,
    is_swapped,
    is_watched,
    original_class,
    steps_aside,
    swap_forward,
    swap_state,
)
from memopt.walk.probes.isolate import with_stand_ins
from memopt.walk.sites import NormSite

#: Width for the comparison of the formula with a stock module whose width is unknown.
_ANY_WIDTH = 64
#: Largest RMS error of a stock module against the formula, in roundings of its output; real norms stay below it.
_STOCK_ROUNDINGS = 16


@dataclass(frozen=True)
class NormRewrite(Rewrite):
    """State of a patched norm: its family, the names of its parameters, and the readers of its output."""

    spec: NormSpec
    weight: str | None
    bias: str | None
    only_linears_read: bool
    """All readers that the walk saw are linears: under autocast they share one cast of the output."""
    keeps_input: bool
    """The input stays as it is, and more is computed of the output than products of linears, for which it may be needed
    to the bit: the input may be saved in the place of x_hat."""
    copies_output: bool
    """The output may be changed in place, by the model or by who calls it: it must not be the saved x_hat."""
    frozen: Frozen = ()
    dtypes: dict[object, torch.dtype | None] = field(default_factory=dict, compare=False, repr=False)
    """(dtypes of the tensors and of autocast, is CUDA) -> dtype of the stock module's output, None if it raises."""

    def undo(self, module: nn.Module) -> None:
        thaw(module, self.frozen)


def patch_norm(module: nn.Module, site: NormSite, *, folded: bool) -> None:
    """Make `module` keep x_hat for backward. Raises a ValueError if the module cannot be swapped or is not the norm
    that `site` describes."""
    weight, bias = local_name(site.weight), local_name(site.bias)
    if site.kind != "rms" and site.kind != "layer":
        raise ValueError(f"there is no formula for a norm of kind '{site.kind}'")
    spec = NormSpec(kind=site.kind, eps=site.eps, offset=site.offset, cast=site.cast)
    tensors = [getattr(module, name) for name in (weight, bias) if name is not None]
    if any(tensor.shape != (site.hidden_size,) for tensor in tensors):
        raise ValueError(f"its parameters do not have {site.hidden_size} elements")
    # A norm without an affine takes any width, and one that no forward ran has shown none.
    _prove(module, spec, weight, bias, site.hidden_size or _ANY_WIDTH)
    only_linears = bool(site.consumers) and not site.reaches
    with freezing(module, site if folded else None) as frozen:
        reads_x_hat = only_linears and all(consumer.same_storage for consumer in site.consumers)
        keeps_input = site.executed and not site.input_changes and not reads_x_hat
        leaves = any(reach.what == "model output" for reach in site.reaches)
        copies = site.output_changes or leaves or not site.executed
        rewrite = NormRewrite(spec, weight, bias, only_linears, keeps_input, copies, frozen)
        swap_forward(module, _forward, rewrite, _reads(module, rewrite, site.hidden_size or _ANY_WIDTH))


def _reads(module: nn.Module, rewrite: NormRewrite, width: int) -> Reads:
    """The values that the stock forward reads: weight and bias are among them only if they were folded away."""
    names = [name for name in (rewrite.weight, rewrite.bias) if name is not None]
    x = torch.ones(2, width, device="cpu") if not names else torch.ones_like(getattr(module, names[0])).expand(2, -1)
    fresh = () if rewrite.frozen else names
    return observed_reads(module, lambda alone: alone.forward(x), fresh=fresh, alike=(x.shape, x.dtype, x.device))


def norm_of_sum(module: nn.Module, a: Tensor, b: Tensor) -> Tensor:
    """``module(a + b)``; if `module` is patched, its norm operator reads both terms instead of their sum."""
    rewrite = swap_state(module) if is_swapped(module) else None
    if isinstance(rewrite, NormRewrite) and _are_alike(a, b) and not is_watched(module) and is_as_patched(module):
        call = _call(rewrite, module, a, b)
        if call is not None:
            return ms_norm(a, *call, b, copies_output=rewrite.copies_output)
    y: Tensor = module(a + b)
    return y


def _are_alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.get_device() == b.get_device()


def _forward(
    stock: Callable[..., Tensor], rewrite: NormRewrite, module: nn.Module, *args: Any, **kwargs: Any
) -> Tensor:
    given = (*args, *kwargs.values())
    call = _call(rewrite, module, *given) if len(given) == 1 and not steps_aside() else None
    if call is None:
        return stock(module, *args, **kwargs)
    # A hook may change the output.
    copies = call[0] is None and (rewrite.copies_output or is_watched(module))
    return ms_norm(given[0], *call, keeps_input=rewrite.keeps_input, copies_output=copies)


_Call = tuple[Tensor | None, Tensor | None, NormSpec, torch.dtype, torch.dtype, bool]


def _call(rewrite: NormRewrite, module: nn.Module, *terms: Tensor) -> _Call | None:
    """Arguments of `ms_norm` beside its input, which is the sum of `terms`; None if the stock forward has to run."""
    x = terms[0]
    if module._modules and any(map(is_watched, module.children())):
        return None
    weight = None if rewrite.weight is None else _parameter(module, rewrite.weight)
    bias = None if rewrite.bias is None else _parameter(module, rewrite.bias)
    if (weight is None) is not (rewrite.weight is None) or (bias is None) is not (rewrite.bias is None):
        return None
    if weight is not None and (weight.shape != x.shape[-1:] or (bias is not None and bias.shape != weight.shape)):
        return None  # the stock module broadcasts it, or raises
    if not x.requires_grad and not any(
        tensor is not None and tensor.requires_grad for tensor in (*terms[1:], weight, bias)
    ):
        return None
    autocast = None if x.dtype is torch.float64 else autocast_dtype(x)
    dtype: torch.dtype | None = x.dtype
    if autocast is not None:
        dtype = _dtype_under_autocast(rewrite, module, x, weight, bias, autocast)
    elif (weight is not None and weight.dtype is not dtype) or (bias is not None and bias.dtype is not dtype):
        return None  # the dtype of its output depends on the module's code
    if dtype is None:
        return None
    if rewrite.frozen:
        weight = bias = None
    return weight, bias, rewrite.spec, dtype, autocast or dtype, rewrite.only_linears_read


def _dtype_under_autocast(
    rewrite: NormRewrite,
    module: nn.Module,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    autocast: torch.dtype,
) -> torch.dtype | None:
    """The dtype in which the stock module returns the norm of `x`, by its code and device; None if it raises."""
    form = x.dtype, weight is not None and weight.dtype, bias is not None and bias.dtype, autocast, x.is_cuda
    if form not in rewrite.dtypes:
        try:
            with torch.no_grad():
                row = x.new_zeros((1,) * (x.dim() - 1) + (x.size(-1),))
                rewrite.dtypes[form] = original_class(module).forward(module, row).dtype
        except Exception:  # the stock forward raises for a row of zeros, so it is left to raise for x
            rewrite.dtypes[form] = None
    return rewrite.dtypes[form]


def _parameter(module: nn.Module, name: str) -> Tensor | None:
    parameter = module._parameters.get(name)
    if parameter is None:  # a buffer, a computed attribute, or missing
        computed: Tensor | None = getattr(module, name, None)
        return computed
    return parameter


@torch.no_grad()
def _prove(module: nn.Module, spec: NormSpec, weight: str | None, bias: str | None, hidden_size: int) -> None:
    """Compare memopt's norm with the stock module, on its own weights, by their errors against the formula in fp64."""
    parameter = next(module.parameters(), None)
    dtype, device = (parameter.dtype, parameter.device) if parameter is not None else (torch.float32, "cpu")
    if parameter is not None and (parameter.is_meta or type(parameter.data) is not Tensor):
        return
    generator = torch.Generator().manual_seed(0)
    spec = replace(spec, eps=spec.eps_in(dtype))
    # Two rows of ordinary size, and two so small that eps is half of the sum under the root.
    small = math.sqrt(spec.eps_in(dtype)) / 3 or 1.0
    scale = torch.tensor([[1.0], [1.0], [small], [small]], dtype=torch.float64)
    x = torch.randn(4, hidden_size, generator=generator, dtype=torch.float64) * 3 + 0.5
    x = (x * scale).to(device, dtype)
    gamma, beta = (None if name is None else getattr(module, name) for name in (weight, bias))
    exact = normalize(x.double(), spec)[0]
    truth = _double_affine(exact, gamma, beta, spec)
    # The absolute terms of y: the terms may cancel in y, but their roundings do not.
    terms = _double_affine(
        exact.abs(), None if gamma is None else gamma.abs(), None if beta is None else beta.abs(), spec
    )
    try:
        with torch.autocast(x.device.type, enabled=False):
            stock = with_stand_ins(module).forward(x[None])[0]
    except Exception as error:  # a forward may raise anything
        raise ValueError(f"its forward does not run alone: {error}") from error
    ours = affine(normalize(x, spec)[0], gamma, beta, spec, x.dtype, stock.dtype)
    rounding = torch.finfo(stock.dtype).eps * terms + torch.finfo(accumulation_dtype(dtype)).tiny
    stock_error = ((stock.double() - truth).abs() / rounding).max()
    our_error = ((ours.double() - truth).abs() / rounding).max()
    # A stock norm differs from the formula by roundings only: in fp64 by roundings of fp32, since many norms cast to
    # float32 inside. A wrong eps changes the small rows, by up to 64 roundings of bf16.
    step = max(torch.finfo(stock.dtype).eps, torch.finfo(torch.float32).eps)
    for rows in (slice(2), slice(2, 4)):
        size = step * terms[rows].square().mean().sqrt()
        off = float((stock.double() - truth)[rows].square().mean().sqrt() / size)
        if not off <= _STOCK_ROUNDINGS:
            raise ValueError(f"it does not compute the norm that its site describes (off by {off:.1f} roundings)")
    # Two roundings (of x_hat and of the product) are inherent to saving x_hat; twice the stock error may be added.
    if not our_error <= 2 * stock_error + 2:
        raise ValueError(f"its norm is less exact here than the stock one (error {float(our_error):.1f} roundings)")


def _double_affine(x_hat: Tensor, weight: Tensor | None, bias: Tensor | None, spec: NormSpec) -> Tensor:
    gamma, beta = (None if p is None else p.double() for p in (weight, bias))
    return affine(x_hat, gamma, beta, spec, torch.float64, torch.float64)
