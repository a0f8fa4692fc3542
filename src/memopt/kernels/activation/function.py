"""An elementwise activation that keeps its input only.

    forward   h = f(z)          backward   dz = f'(z) * dh

An activation composed of several operations makes autograd keep an intermediate for each (gelu_new keeps five
tensors). This operator saves z alone, and h can be recomputed from it: its readers save z, or a handle inside a
`memopt.saved.RecomputeScope`.

With Triton and a known activation f, one kernel computes h and another one dz, in fp32 with one rounding; a linear that
reads h gets it from the same pass as dz (`memopt.kernels.linear.function`). Otherwise the stock function computes h and
backward differentiates that function again at z: value and gradient equal the stock module's to the bit.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from memopt.kernels.base.autograd import autocast_as, autocast_dtype, may_be_overwritten, refuse_double_backward
from memopt.kernels.base.device import imported_once, runs_triton
from memopt.kernels.base.pieces import elementwise
from memopt.kernels.base.rows import laid_out_like
from memopt.kernels.base.saved_inputs import SavedInputsFunction, Steps
from memopt.recompute.rules import ELEMENTWISE, register_operator
from memopt.recompute.specs import Recomputed, attach_spec
from memopt.torch_compat import DirectFunction
from memopt.torch_compat.activations import ACTIVATIONS, Elementwise

#: (dtype of the input, dtype of autocast) -> dtype of the output.
Dtypes = dict[tuple[torch.dtype, torch.dtype | None], torch.dtype]


def recomputed_activation(
    z: Tensor, function: Elementwise, kind: str | None = None, found: Dtypes | None = None, *, specifies: bool = True
) -> Tensor:
    """function(z), keeping z only.

    Args:
        z: any shape, floating point.
        function: elementwise, without parameters and without randomness.
        kind: the key of `memopt.torch_compat.activations.ACTIVATIONS` that `function` computes; None if it is none
            of them.
        found: output dtypes that earlier calls of this function found; this call may add one.
        specifies: the output carries a spec, which holds `z`. False if `z` is recomputed too: the spec would keep it.

    Returns:
        The value of function(z), with its shape and dtype.
    """
    compiling = torch.compiler.is_compiling()
    h: Tensor
    dtype = _dtype_of(function, z, found) if kind in ACTIVATIONS and (compiling or runs_triton(z)) else None
    if compiling:  # if the output has another dtype, the compiler decides which tensors are saved
        return activation(z, kind) if kind is not None and dtype is z.dtype else function(z)
    one_pass = None
    if kind is not None and dtype in (z.dtype, torch.float32):
        steps = _steps(kind, dtype)
        recomputed = Recomputed(steps.value)
        h = KernelActivationFunction.apply(steps, recomputed, z)
        one_pass = steps.differentiate if dtype is z.dtype else None
    else:
        recomputed = Recomputed(functools.partial(recompute_activation, function, autocast=autocast_dtype(z)))
        h = ActivationFunction.apply(z, function, recomputed)
    if specifies:
        attach_spec(h, (z,), recomputed, differentiate=one_pass)
    return h


def recomputed_relu(z: Tensor, *, in_place: bool = False) -> Tensor:
    """relu(z), saving only z, which is itself recomputed. For eager mode only.

    Args:
        z: any shape, floating point.
        in_place: the output gets the memory of `z`, which nothing else may use.
    """
    steps = _steps("relu", z.dtype)
    recomputed = Recomputed(_relu_again)
    recomputed.for_node = not runs_triton(z)
    h: Tensor = (InPlaceReluFunction if in_place else ReluFunction).apply(steps, recomputed, z)
    return h


@functools.cache
def _steps(kind: str, dtype: torch.dtype) -> Steps:
    return Steps(functools.partial(_value, kind=kind, dtype=dtype), functools.partial(_gradients, kind=kind), True)


def _dtype_of(function: Elementwise, z: Tensor, found: Dtypes | None) -> torch.dtype:
    """The dtype of function(z). A module may compute in fp32 and return fp32; under autocast some operations (a power,
    a softplus) return fp32."""
    form = z.dtype, autocast_dtype(z)
    if form == (torch.float32, None):
        return z.dtype
    found = {} if found is None else found
    if form not in found:
        with torch.no_grad():
            found[form] = function(z.new_empty(0)).dtype
    return found[form]


class ActivationFunction(DirectFunction):
    """Saves z; backward runs `function` again and differentiates it."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, function: Elementwise, recomputed: Recomputed) -> Tensor:
        ctx.function, ctx.recomputes_output, ctx.recomputed = function, True, recomputed
        ctx.autocast = autocast_dtype(z)
        ctx.save_for_backward(z)
        return function(z)

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor, None, None]:
        refuse_double_backward()
        ctx.recomputed.finish()
        (z,) = ctx.saved_tensors
        return differentiate(ctx.function, z, dh, ctx.autocast), None, None


register_operator("ActivationFunctionBackward", ELEMENTWISE)


def differentiate(function: Elementwise, z: Tensor, dh: Tensor, autocast: torch.dtype | None) -> Tensor:
    """function'(z) * dh, by autograd, in the dtypes that autocast to `autocast` (None: off) gave to the forward."""

    def gradient(z: Tensor, dh: Tensor) -> Tensor:
        # Backward runs outside the forward's autocast region, which decides in what dtype each step is computed.
        with torch.enable_grad(), autocast_as(autocast, z):
            z = z.detach().requires_grad_()
            h = function(z)
        (dz,) = torch.autograd.grad(h, z, dh)
        return dz

    return elementwise(gradient, z, dh)


def recompute_activation(function: Elementwise, z: Tensor, autocast: torch.dtype | None) -> Tensor:
    """function(z) again, under the same autocast."""
    with autocast_as(autocast, z):
        return elementwise(function, z)


class KernelActivationFunction(SavedInputsFunction):
    """Saves z; forward and backward are one kernel each."""


register_operator("KernelActivationFunctionBackward", ELEMENTWISE)


def _relu_again(z: Tensor) -> Tensor:
    """relu(z), written over z if nothing else holds z (it was recomputed for this call alone)."""
    return z.data.clamp_min_(0) if may_be_overwritten(z) else _value(z, kind="relu", dtype=z.dtype)


class ReluFunction(SavedInputsFunction):
    """Saves z, which is itself recomputed. Its backward reads h if a reader has recomputed h, else z: both are > 0 at
    the same elements."""

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        h = ctx.recomputed.as_produced()
        if h is None:
            return SavedInputsFunction.backward(ctx, dh)
        refuse_double_backward()
        ctx.recomputed.finish()
        return None, None, torch.ops.aten.threshold_backward(dh, h, 0)


class InPlaceReluFunction(ReluFunction):
    """:class:`ReluFunction` with an output in the memory of z."""

    @staticmethod
    def forward(ctx: Any, steps: Steps, recomputed: Recomputed, *inputs: Tensor) -> Tensor:
        def write(z: Tensor) -> Tensor:
            # With `.data` neither z nor the output counts as changed in place: such a tensor would not be recomputed.
            return z.data.clamp_min_(0).data

        output = SavedInputsFunction.forward(ctx, steps._replace(value=write), recomputed, *inputs)
        ctx.steps = steps
        return output


for _node in ("ReluFunctionBackward", "InPlaceReluFunctionBackward"):
    register_operator(_node, ELEMENTWISE)


def _value(z: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """f(z) in `dtype`, which is the dtype of z or fp32."""
    if runs_triton(z):
        h: Tensor = _kernels().launch_forward(z, kind, dtype)
        return h
    with autocast_as(None, z):
        return ACTIVATIONS[kind].value(z.to(dtype))


def _gradients(
    dh: Tensor, z: Tensor, *, kind: str, recompute: bool, owns_dh: bool = False, given_once: bool = False
) -> tuple[tuple[Tensor], Tensor | None]:
    """dz and, with `recompute`, h (else None). With `owns_dh` one of them may be written over dh, if it fits."""
    if runs_triton(dh, z):
        # The kernel reads each element of z before it overwrites it.
        out = z.detach() if given_once and may_be_overwritten(z) else None
        fits = dh.dtype == z.dtype and dh.is_contiguous() and z.is_contiguous()
        if out is None and owns_dh and not recompute and fits:
            out = dh
        dz, h = _kernels().launch_backward(dh, z, kind, recompute, owns_dh, out)
        return (dz,), h
    with autocast_as(None, z):
        return (ACTIVATIONS[kind].gradient(dh.to(z.dtype), z),), ACTIVATIONS[kind].value(z) if recompute else None


_kernels = imported_once("memopt.kernels.activation.function_triton")


@torch.library.custom_op("memopt::activation", mutates_args=())
def activation(z: Tensor, kind: str) -> Tensor:
    """f(z) with the strides of ``torch.empty_like(z)``."""
    return laid_out_like(z, _value(z, kind, z.dtype))


@torch.library.custom_op("memopt::activation_backward", mutates_args=())
def activation_backward(dh: Tensor, z: Tensor, kind: str) -> Tensor:
    """f'(z) * dh with the strides of ``torch.empty_like(z)``."""
    return laid_out_like(z, _gradients(dh, z, kind=kind, recompute=False)[0][0])


activation.register_fake(lambda z, kind: torch.empty_like(z))
activation_backward.register_fake(lambda dh, z, kind: torch.empty_like(z))


def _setup(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    z, ctx.kind = inputs
    ctx.save_for_backward(z)


def _backward(ctx: Any, dh: Tensor) -> tuple[Tensor, None]:
    (z,) = ctx.saved_tensors
    return activation_backward(dh, z, ctx.kind), None


activation.register_autograd(_backward, setup_context=_setup)
