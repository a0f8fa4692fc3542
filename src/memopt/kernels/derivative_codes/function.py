"""An elementwise activation that saves a few bits an element: a code of the derivative.

    forward   h = f(z), exact          backward   dz = level(code(z)) * dh

The codes are those of `memopt.kernels.derivative_codes.codes`. `coded_activation` saves the code in forward;
`CodableFunction` saves z in a slot that may replace it by the code (`memopt.patches.activation.module`), and
differentiates exactly while it has z. `MaskableReluFunction` saves h in such a slot, as a stock ReLU does, or its mask,
which is exact.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from memopt.kernels.activation.function import differentiate, recompute_activation
from memopt.kernels.base.autograd import autocast_dtype, refuse_double_backward
from memopt.kernels.derivative_codes.codes import apply_code, encode
from memopt.kernels.derivative_codes.schemes import RELU_MASK, DerivativeCode
from memopt.recompute.rules import ELEMENTWISE, RULES, Rule, recomputable
from memopt.torch_compat.activations import Elementwise


class CodeSlot(Protocol):
    """The slot in which the input of an activation is saved."""

    is_coded: bool


def coded_activation(z: Tensor, function: Elementwise, code: DerivativeCode) -> Tensor:
    """function(z), saving code(z) only: z.numel() * bits / 8 bytes and a flag for every 1,024 elements.

    Args:
        z: any shape, floating point.
        function: elementwise, without parameters and without randomness.
        code: of the derivative of `function`.

    Returns:
        The value of function(z), with its shape and dtype.
    """
    h: Tensor = CodedFunction.apply(z, function, code)  # type: ignore[no-untyped-call]
    return h


class CodedFunction(torch.autograd.Function):
    """Saves the code."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, function: Elementwise, code: DerivativeCode) -> Tensor:
        ctx.code, ctx.dtype = code, z.dtype
        ctx.save_for_backward(encode(z, code))
        return function(z)

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor, None, None]:
        refuse_double_backward()
        (packed,) = ctx.saved_tensors
        return apply_code(dh, packed, ctx.code).to(ctx.dtype), None, None


class CodableFunction(torch.autograd.Function):
    """Saves z; backward finds z or, if its slot was replaced, the code."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, function: Elementwise, code: DerivativeCode, slot: CodeSlot | None) -> Tensor:
        ctx.function, ctx.code, ctx.dtype = function, code, z.dtype
        # Autograd owns the slot and frees it after backward; a strong reference would keep it as long as the graph.
        ctx.slot = None if slot is None else weakref.ref(slot)
        ctx.autocast = autocast_dtype(z)
        ctx.save_for_backward(z)
        return function(z)

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor, None, None, None]:
        refuse_double_backward()
        (kept,) = ctx.saved_tensors
        if _is_coded(ctx):
            return apply_code(dh, kept, ctx.code).to(ctx.dtype), None, None, None
        return differentiate(ctx.function, kept, dh, ctx.autocast), None, None, None


def _is_coded(node: Any) -> bool:
    slot = None if node.slot is None else node.slot()
    return slot is not None and slot.is_coded


def _is_whole(node: Any) -> bool:
    return hasattr(node, "slot") and not _is_coded(node)


@recomputable("CodableFunctionBackward", ELEMENTWISE, _is_whole)
def _output(node: Any) -> Tensor:
    (z,) = node.saved_tensors
    return recompute_activation(node.function, z, node.autocast)


class MaskableReluFunction(torch.autograd.Function):
    """Saves h; backward finds h or, if its slot was replaced, one bit for each element."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, slot: CodeSlot | None) -> Tensor:
        ctx.slot = None if slot is None else weakref.ref(slot)
        h = torch.relu(z)
        ctx.save_for_backward(h)
        return h

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor, None]:
        refuse_double_backward()
        (kept,) = ctx.saved_tensors
        if _is_coded(ctx):
            return apply_code(dh, kept, RELU_MASK), None
        dz: Tensor = torch.ops.aten.threshold_backward(dh, kept, 0)
        return dz, None


RULES["MaskableReluFunctionBackward"] = Rule(
    lambda node: node.saved_tensors[0], _is_whole, ELEMENTWISE, of_copies_only=True
)
