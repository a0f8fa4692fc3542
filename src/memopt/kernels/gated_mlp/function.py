"""The product of a gated MLP, keeping gate and up only.

    forward     h = f(gate) * up
    backward    dgate = f'(gate) * up * dh,   dup = f(gate) * dh

Stock modules save gate, f(gate), up and h: four intermediates for every token. This operator saves gate and up, from
which backward recomputes h: in a pass of its own for a reader that holds a handle (`memopt.saved`), or in one pass with
dgate and dup for the linear that reads h (`memopt.kernels.linear.function`). With Triton, each pass is one kernel that
computes in fp32 and rounds once. Otherwise a pass runs the operations that autograd would run, with the stock module's
rounding.

Gate and up may be the two halves of one tensor (`*_fused`); then their gradients are written into the two halves of one
tensor, and nothing is split or concatenated.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from memopt.kernels.base.autograd import autocast_as, autocast_dtype, may_be_overwritten
from memopt.kernels.base.device import imported_once, runs_triton
from memopt.kernels.base.saved_inputs import SavedInputsFunction, Steps
from memopt.kernels.linear.function import fused_linear, is_plain
from memopt.recompute.rules import PRODUCT, register_operator
from memopt.recompute.specs import Recomputed, attach_spec
from memopt.torch_compat import is_legacy_batched
from memopt.torch_compat.activations import ACTIVATIONS


def gated_product(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """h = f(gate) * up, keeping gate and up; inside a `memopt.saved.RecomputeScope` readers keep a handle of h.

    Args:
        gate, up: (..., intermediate), floating point, of one shape; any strides.
        kind: key of `memopt.torch_compat.activations.ACTIVATIONS`.

    Returns:
        h in the dtype that gate and up promote to (under autocast too).

    Raises:
        ValueError: the shapes differ.
    """
    _check_shapes(gate, up)
    return _product(gate, up, kind, True)


def gated_product_fused(gate_up: Tensor, kind: str, gate_first: bool) -> Tensor:
    """:func:`gated_product` of the halves of `gate_up` (..., 2 * intermediate); gate is the first one or the second.

    Raises:
        ValueError: the last dimension is odd.
    """
    _check_halves(gate_up)
    return _product(gate_up, None, kind, gate_first)


def gated_linear(
    gate: Tensor, up: Tensor | None, kind: str, gate_first: bool, weight: Tensor, bias: Tensor | None
) -> Tensor | None:
    """``linear(h, weight, bias)`` of the product h as one function, which saves gate and up and never h.

    Args:
        gate, up, kind: as in :func:`gated_product`; `up` is None if `gate` holds both halves.
        gate_first: which half of `gate` is the gate.
        weight, bias: of the linear; (out, intermediate) and (out,) or None.

    Returns:
        y (..., out); None if the linear has to run on its own: if a dtype differs (under autocast: gate's or up's
        from autocast's), or if the weight is frozen or not plain.
    """
    if up is None:
        _check_halves(gate)
    else:
        _check_shapes(gate, up)
    dtype, autocast = gate.dtype, autocast_dtype(gate)
    alike = dtype is (weight.dtype if autocast is None else autocast) and (up is None or up.dtype is dtype)
    if not alike or not weight.requires_grad or not is_plain(weight) or not gate.requires_grad:
        return None
    steps, inputs = _steps(kind, gate_first, up is None), (gate,) if up is None else (gate, up)
    return fused_linear(steps.differentiate, steps.value, weight, bias, *inputs)


# Below, `up` is None if `gate` holds both halves; only then is `gate_first` read.


def _product(gate: Tensor, up: Tensor | None, kind: str, gate_first: bool) -> Tensor:
    if torch.compiler.is_compiling():
        h: Tensor = product_op(gate, up, kind, gate_first)
    else:
        steps, inputs = _steps(kind, gate_first, up is None), (gate,) if up is None else (gate, up)
        recomputed = Recomputed(steps.value)
        h = GatedProductFunction.apply(steps, recomputed, *inputs)
        attach_spec(h, inputs, recomputed, differentiate=steps.differentiate)
    return h


@functools.cache
def _steps(kind: str, gate_first: bool, are_halves: bool) -> Steps:
    """The steps of the product. The gradient of one tensor with both halves is too large to be written over dh."""
    value = functools.partial(_value, kind=kind, gate_first=gate_first)
    return Steps(value, functools.partial(_gradients, kind=kind, gate_first=gate_first), not are_halves)


class GatedProductFunction(SavedInputsFunction):
    """Saves gate and up, or the one tensor that holds both."""


register_operator("GatedProductFunctionBackward", PRODUCT)


def _value(gate: Tensor, up: Tensor | None = None, *, kind: str, gate_first: bool) -> Tensor:
    """h"""
    gate, up = _halves(gate, up, gate_first)
    if gate.dtype == up.dtype and runs_triton(gate, up):
        h: Tensor = _kernels().launch_forward(gate, up, kind)
        return h
    with autocast_as(None, gate):
        return ACTIVATIONS[kind].value(gate) * up


def _gradients(
    dh: Tensor,
    gate: Tensor,
    up: Tensor | None = None,
    *,
    kind: str,
    gate_first: bool,
    recompute: bool,
    owns_dh: bool = False,
    given_once: bool = False,
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """(dgate and dup, or one tensor of both; h with `recompute`, else None). With `owns_dh`, dh may be overwritten."""
    # Test this before views of the tensors exist.
    alone = given_once and may_be_overwritten(*(tensor for tensor in (gate, up) if tensor is not None))
    z, factor = _halves(gate, up, gate_first)
    by_kernel = z.dtype == factor.dtype and runs_triton(dh, z, factor)
    overwrites = alone and by_kernel  # a kernel reads each element before it overwrites it
    # A batch of gradients has one more dimension than gate and up, so no tensor of their shape can hold it.
    is_batched = is_legacy_batched(dh)
    both = halves = None
    if up is None and not is_batched:
        both = gate.detach() if overwrites else torch.empty_like(gate, memory_format=torch.contiguous_format)
        halves = _halves(both, None, gate_first)
    elif overwrites:
        halves = z.detach(), factor.detach()
    if by_kernel:
        if halves is None and owns_dh and not recompute and dh.dtype == z.dtype and dh.is_contiguous():
            halves = torch.empty(z.shape, dtype=z.dtype, device=z.device), dh
        dgate, dup, h = _kernels().launch_backward(dh, z, factor, kind, recompute, halves, owns_dh)
    else:
        with autocast_as(None, z):
            activated = ACTIVATIONS[kind].value(z)
            h = activated * factor if recompute else None
            in_place = owns_dh and not is_batched and dh.dtype == z.dtype == factor.dtype
            dup = activated.mul_(dh) if in_place else (dh * activated).to(factor.dtype)
            del activated
            if halves is not None:
                dup = halves[1].copy_(dup)
            dgate = ACTIVATIONS[kind].gradient(dh.mul_(factor) if in_place else (dh * factor).to(z.dtype), z)
            if halves is not None:
                dgate = halves[0].copy_(dgate)
            if up is None and is_batched:
                both = torch.cat((dgate, dup) if gate_first else (dup, dgate), -1)
    return ((dgate, dup) if both is None else (both,)), h


_kernels = imported_once("memopt.kernels.gated_mlp.function_triton")


def _halves(gate: Tensor, up: Tensor | None, gate_first: bool) -> tuple[Tensor, Tensor]:
    if up is not None:
        return gate, up
    first, second = gate.chunk(2, -1)
    return (first, second) if gate_first else (second, first)


def _check_shapes(gate: Tensor, up: Tensor) -> None:
    if gate.shape != up.shape:
        raise ValueError(f"gate and up have different shapes: {tuple(gate.shape)} and {tuple(up.shape)}")


def _check_halves(gate_up: Tensor) -> None:
    if gate_up.dim() == 0 or gate_up.size(-1) % 2:
        raise ValueError(f"a tensor of shape {tuple(gate_up.shape)} has no two halves for gate and up")


# For compilers (torch.compile, torch.export): the same functions as opaque operators with contiguous results.


def _contiguous_product(gate: Tensor, up: Tensor | None, kind: str, gate_first: bool = True) -> Tensor:
    return _value(gate, up, kind=kind, gate_first=gate_first).contiguous()


def _contiguous_gradients(
    dh: Tensor, gate: Tensor, up: Tensor | None, kind: str, gate_first: bool = True, recompute: bool = False
) -> list[Tensor]:
    """dgate (both halves if up is None), dup (if up is not None) and h (with `recompute`)."""
    found, h = _gradients(dh, gate, up, kind=kind, gate_first=gate_first, recompute=recompute)
    return [t.contiguous() for t in (*found, h) if t is not None]


# On fake tensors the references compute the same shapes, dtypes and strides.
product_op = torch.library.custom_op("memopt::gated_product", _contiguous_product, mutates_args=())
product_op.register_fake(_contiguous_product)
product_backward_op = torch.library.custom_op("memopt::gated_product_backward", _contiguous_gradients, mutates_args=())
product_backward_op.register_fake(_contiguous_gradients)


def _product_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, ctx.kind, ctx.gate_first = inputs
    ctx.save_for_backward(gate, up)


def _product_backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    gate, up = ctx.saved_tensors
    dgate, *dup = product_backward_op(dh, gate, up, ctx.kind, ctx.gate_first)
    return dgate, dup[0] if dup else None, None, None


product_op.register_autograd(_product_backward, setup_context=_product_setup)
