"""A linear that saves the tensors that recompute its input, instead of its input.

    forward     y = x W^T + b            x = f(saved)
    backward    dx = dy W,   dW = dy^T x,   db = sum over rows of dy,   x recomputed once for all its readers

The input carries a spec with these tensors (`memopt.recompute.specs`); without a spec the stock linear runs.

A linear needs its input x before the gradient of x exists, so recomputing x costs a pass of its own. If the producer's
backward can recompute x in its own pass, one function replaces both the linear and the producer of its input in the
graph: for f(z) one pass moves 4 instead of 5 tensors of the size of x, for f(gate) * up 6 instead of 8. Otherwise
backward recomputes x first, and frees x before it computes its gradient.

A linear's output may be recomputed as well, for its readers (:func:`recomputed_output`):

    forward     y = run(x)          backward    dx, dW as run's own graph computes them; y = run(x) once for its readers
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt.kernels.base.autograd import (
    are_from_checkpoint,
    autocast_dtype,
    not_a_view,
    refuse_double_backward,
    without_autocast,
)
from memopt.kernels.linear.weighted import followed, noted
from memopt.recompute.rules import LINEAR, register_operator
from memopt.recompute.specs import Differentiate, Recompute, Recomputed, RecomputeSpec, spec_of
from memopt.torch_compat import (
    PLAIN_TYPES,
    DirectFunction,
    any_autocast_enabled,
    checkpointing_hook,
    current_graph_task_id,
    is_selectively_checkpointed,
    is_transformed,
    tensor_hooks,
)

LARGE = 2**16
"""Elements of a weight from which on its copy costs more than the host's time for an autograd function of memopt."""


def is_plain(weight: object) -> bool:
    """Whether `weight` is a tensor, a parameter or a fake tensor: weights of other types may override `F.linear`."""
    return type(weight) in PLAIN_TYPES


def reads_spec(x: Any, weight: Tensor) -> RecomputeSpec | None:
    """The spec by which :func:`linear` would recompute `x`; None if it would save `x`, or nothing.

    With a spec, the weight is trained and plain, and only autocast casts `x` or the weight. Not for compiled code.
    """
    if not weight.requires_grad or type(weight) not in PLAIN_TYPES:
        return None
    spec = spec_of(x)
    return None if spec is None or (x.dtype is not weight.dtype and autocast_dtype(x) is None) else spec


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, fuses: bool = True) -> Tensor:
    """``F.linear(x, weight, bias)``, under autocast too, that does not save `x` where it can be recomputed.

    Args:
        x: (..., in), floating point.
        weight: (out, in), in any layout. Its module is not called for it.
        bias: (out,) or None.
        fuses: this linear is the reader of `x`, so its backward may run the backward of the producer of `x` as well.

    Returns:
        y: (..., out).
    """
    spec = None if torch.compiler.is_compiling() else reads_spec(x, weight)
    if spec is None:
        return F.linear(x, weight, bias)
    return recomputed_linear(x, weight, bias, spec, fuses=fuses)


def recomputed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, spec: RecomputeSpec, *, fuses: bool) -> Tensor:
    """:func:`linear` of an `x` with this spec."""
    dtype = autocast_dtype(x) if any_autocast_enabled() else None
    if dtype is not None and x.dtype in (dtype, torch.float64):  # autocast leaves fp64 as it is
        dtype = None
    # A property costs a call, and few modules follow products.
    is_followed = followed.held is not None and followed.products is not None
    is_free = not tensor_hooks(x) and not x.retains_grad and not is_followed
    if fuses and dtype is None and spec.differentiate is not None and is_free:
        differentiate, spec.differentiate = spec.differentiate, None
        assert spec.saved is not None
        return fused_linear(differentiate, lambda *_: x, weight, bias, *spec.saved)
    y: Tensor = RecomputedInputFunction.apply(x, weight, bias, spec, dtype)
    return noted(y, x, weight, bias, spec) if is_followed else y


def fused_linear(
    differentiate: Differentiate, value: Recompute, weight: Tensor, bias: Tensor | None, *inputs: Tensor | None
) -> Tensor:
    """``F.linear(value(*inputs), weight, bias)`` by :class:`FusedLinearFunction`."""
    y: Tensor = FusedLinearFunction.apply(differentiate, value, weight, bias, *inputs)
    return computed(y, lambda h: _linear(h, weight, bias))


def saves_a_cast_weight(x: object, weight: Tensor) -> bool:
    """Whether the stock linear would save a copy of `weight` in autocast's dtype; :func:`cast_linear` does not."""
    if torch.compiler.is_compiling() or not isinstance(x, Tensor):  # a compiler's partitioner decides what is saved
        return False
    dtype = autocast_dtype(x)
    if dtype is None or type(x) not in PLAIN_TYPES or type(weight) not in PLAIN_TYPES or weight.numel() < LARGE:
        return False
    if weight.dtype in (dtype, torch.float64) or x.dtype is torch.float64 or not x.requires_grad:
        return False
    if x.layout is not torch.strided or x.is_nested or is_transformed(x):  # no storage to look at
        return False
    # Autocast casts a leaf once for all its readers. A scope copies a small view out of its storage only if no autograd
    # function saves it.
    return not weight.requires_grad or (not x.is_leaf and x.untyped_storage().nbytes() == x.nbytes)


def cast_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear(x, weight, bias)`` under autocast that saves `weight` itself; backward casts it again.

    For each element of the weight, backward moves 6 bytes more, and 2 bytes less are held until then.
    """
    narrow = x.to(autocast_dtype(x))
    y: Tensor = RecomputedInputFunction.apply(narrow, weight, bias, None, None)
    return y if followed.products is None else noted(y, narrow, weight, bias, None)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear in the dtype of `x`, which is autocast's dtype if autocast is on.

    It casts the weight itself, since autocast would cache its cast without the graph that other readers need. The cast
    is not saved: backward casts the weight again, and autograd casts each gradient to the dtype of its tensor.
    """
    dtype = x.dtype
    if weight.dtype is not dtype:
        weight = weight.to(dtype)
    if bias is None:
        return F.linear(x, weight)
    return not_a_view(F.linear(x, weight, bias if bias.dtype is dtype else bias.to(dtype)))


def to_be_computed(ctx: Any, h: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
    """In a block that backward runs again, an output without values, which :func:`computed` fills; elsewhere None.

    Checkpointing ends a block's second run at its last saved tensor, and an autograd function saves after its forward.
    So the last linear of a block (of an MLP) would run its product again for nothing; a stock linear does not.
    """
    # Selective checkpointing recognises products by the operators that return them.
    if current_graph_task_id() == -1 or checkpointing_hook() is None or is_selectively_checkpointed():
        return None
    ctx.behind = h
    return h.new_empty((), dtype=dtype).expand(shape).data


def computed(y: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
    """`y`, with the values of ``product(h)`` if it is one :func:`to_be_computed`."""
    h = getattr(y.grad_fn, "behind", None)
    if h is not None:
        del y.grad_fn.behind  # type: ignore[union-attr]
        with torch.no_grad():
            y.data = product(h)
    return y


class RecomputedInputFunction(DirectFunction):
    """Saves the weight itself, not a cast of it, and the tensors that recompute its input; without a spec the input."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, spec: RecomputeSpec | None, dtype: torch.dtype | None
    ) -> Tensor:
        """`dtype` is autocast's if x has another one. The cast has no node of its own: autograd casts the gradient."""
        ctx.input, ctx.shape = spec if spec is None else spec.recomputed, x.shape
        saved = (x if weight.requires_grad else None,) if spec is None else spec.take()
        ctx.save_for_backward(weight, *saved)
        return _linear(x if dtype is None else x.to(dtype), weight, bias)

    @staticmethod
    @without_autocast
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Without a spec, it can be differentiated twice."""
        weight, *saved = ctx.saved_tensors
        of_x, of_weight, of_bias, _, _ = ctx.needs_input_grad
        rows = dy.reshape(-1, dy.size(-1))
        dweight: Tensor | None = None
        # Compute dW first: it reads x, and the last reader frees x.
        if ctx.input is not None:
            refuse_double_backward()
            dweight = weight_gradient(rows, ctx.input.rows(saved, dy.dtype), weight)
        elif of_weight:
            dweight = weight_gradient(rows, saved[0].reshape(-1, weight.size(1)), weight)
        dx = input_gradient(rows, weight, ctx.shape) if of_x else None
        dbias = bias_gradient(rows, weight) if of_bias else None
        return dx, dweight, dbias, None, None


class FusedLinearFunction(DirectFunction):
    """Saves the weight and the inputs of its input's producer; its backward runs the producer's backward as well."""

    @staticmethod
    def forward(
        ctx: Any, differentiate: Differentiate, value: Recompute, weight: Tensor, bias: Tensor | None, *inputs: Tensor
    ) -> Tensor:
        """The linear's input is ``value(*inputs)``. It is no argument: this function replaces its node in the graph."""
        h = value(*inputs)
        ctx.differentiate, ctx.shape, ctx.given_once = differentiate, h.shape, are_from_checkpoint()
        ctx.save_for_backward(weight, *inputs)
        y = to_be_computed(ctx, h, (*h.shape[:-1], weight.size(0)), h.dtype)
        return _linear(h, weight, bias) if y is None else y

    @staticmethod
    @without_autocast
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        weight, *inputs = ctx.saved_tensors
        needs = ctx.needs_input_grad
        rows = dy.reshape(-1, dy.size(-1))
        of_weight: list[Tensor] = []

        def use(h: Tensor) -> None:
            of_weight.append(weight_gradient(rows, h.reshape(-1, h.size(-1)), weight))

        def of_input() -> Tensor:
            return input_gradient(rows, weight, ctx.shape)

        gradients = ctx.differentiate(of_input, tuple(inputs), use if needs[2] else None, ctx.given_once)
        dweight = of_weight[0] if of_weight else None
        dbias = bias_gradient(rows, weight) if needs[3] else None
        wanted = (gradient if need else None for gradient, need in zip(gradients, needs[4:], strict=True))
        return None, None, dweight, dbias, *wanted


def input_gradient(dy: Tensor, weight: Tensor, shape: tuple[int, ...]) -> Tensor:
    """dy W in the dtype of dy, as a tensor of this shape."""
    return dy.mm(weight if weight.dtype is dy.dtype else weight.to(dy.dtype)).view(shape)


def weight_gradient(dy: Tensor, h: Tensor, weight: Tensor) -> Tensor:
    """dy^T h in the layout of the weight, so that accumulating it needs no transposed copy."""
    has_rows = weight.is_contiguous() or weight.stride(-1) == 1
    left, right = (dy.t(), h) if has_rows else (h.t(), dy)
    if weight.dtype is not dy.dtype and _rounds_once(dy, weight):
        product = torch.mm(left, right, out_dtype=torch.float32)
    else:
        product = left.mm(right)
    return product if has_rows else product.t()


def bias_gradient(dy: Tensor, weight: Tensor) -> Tensor:
    """The sum of the rows of dy."""
    return dy.sum(0, dtype=torch.float32) if weight.dtype is not dy.dtype and _rounds_once(dy, weight) else dy.sum(0)


def _rounds_once(dy: Tensor, weight: Tensor) -> bool:
    """Whether, under autocast, a gradient of fp32 parameters is computed in fp32 directly. On a GPU a 16-bit result and
    its cast would take one more rounding, launch and temporary."""
    return dy.is_cuda and weight.dtype is torch.float32 and dy.dtype.itemsize == 2 and not torch.is_grad_enabled()


def recomputed_output(y: Tensor, x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    """`y`, for which `x` is saved. Inside a `memopt.saved.RecomputeScope` an operation that saves y, or a view or cast
    of it, saves a handle instead, which recomputes y as ``run(x)``.

    Args:
        y: any shape, floating point, with its graph. Nothing else refers to it.
        x: the tensor from which `y` was computed; saved.
        run: recomputes y in backward, without a graph; raises if it cannot.
    """
    output: Tensor = OutputFunction.apply(y, x, run)
    return output


class OutputFunction(DirectFunction):
    """Passes y on; saves x. It is linear, so its backward can be differentiated."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.recomputes_output, ctx.recomputed = True, Recomputed(run)
        ctx.save_for_backward(x)
        return y.data  # neither an input nor a tracked view of one

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        ctx.recomputed.finish()
        return dy, None, None


register_operator("OutputFunctionBackward", LINEAR)
