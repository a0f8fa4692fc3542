"""The steps of an MS-norm on any device, and operators with these steps for torch.compile, torch.export and others.

The plain functions choose between the Triton kernels and the reference. The operators ``torch.ops.memopt.ms_*`` run
these functions, opaque to compilers: they have fake kernels, and ``ms_norm_backward`` is the backward of ``ms_norm``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memopt.kernels.base.autograd import accumulation_dtype
from memopt.kernels.base.device import imported_once, runs_triton, skips_pieces
from memopt.kernels.base.pieces import parts_of, slices
from memopt.kernels.norm.reference import NormArguments, NormSpec, affine, norm_backward, normalize

Norm = tuple[Tensor | None, Tensor, Tensor]
"""y, x_hat and rstd."""
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    arguments: NormArguments,
    residual: Tensor | None = None,
    copies: Tensor | None = None,
) -> Norm:
    """y, x_hat (in the dtypes of `arguments`; x itself if they say so) and rstd. y is None if the output is x_hat.

    With a residual, of the shape and dtype of x, this is the norm of x + residual. `copies`, contiguous, is filled with
    weight or bias (hidden,), or with both (2, hidden).
    """
    if residual is not None and (residual.dtype is not x.dtype or residual.shape != x.shape):
        raise ValueError(
            "a sum that is not made needs two tensors of one shape and dtype, not "
            f"{tuple(x.shape)} {x.dtype} and {tuple(residual.shape)} {residual.dtype}"
        )
    if runs_triton(x, weight, bias, residual):
        made: Norm = _kernels().launch_forward(x, weight, bias, arguments, residual, copies)
        return made
    if copies is not None:
        rows_of_copies = copies.view(-1, x.size(-1))
        for place, parameter in ((0, weight), (-1, bias)):
            if parameter is not None:
                rows_of_copies[place].copy_(parameter)
    # With a residual, go by parts in any dtype, so that the whole sum is never stored.
    rows = _parts(x) if residual is None else parts_of(x, residual)
    if rows is not None:
        return _forward_by_parts(x, weight, bias, arguments, residual, rows)
    if residual is not None:
        x = x + residual
    exact, rstd = normalize(x, arguments.spec)
    has_output = weight is not None or bias is not None or arguments.casts
    y = _affine(exact, weight, bias, arguments) if has_output else None
    return y, x if arguments.keeps_input else exact.to(arguments.kept_dtype), rstd


_kernels = imported_once("memopt.kernels.norm.forward_triton")


def _parts(*given: Tensor) -> int | None:
    """Rows at a time of large 16-bit tensors, to avoid an fp32 copy of the whole tensor; None for all at once."""
    return None if any(tensor.element_size() != 2 for tensor in given) else parts_of(*given)


def _forward_by_parts(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    arguments: NormArguments,
    residual: Tensor | None,
    rows: int,
) -> Norm:
    has_output = weight is not None or bias is not None or arguments.casts
    y = x.new_empty(x.shape, dtype=arguments.dtype) if has_output else None
    x_hat = None if arguments.keeps_input else x.new_empty(x.shape, dtype=arguments.kept_dtype)
    rstd = _fake_rstd(x)
    results = [None if tensor is None else tensor.view(-1, tensor.size(-1)) for tensor in (y, x_hat, rstd)]
    flat, other = x.view(-1, x.size(-1)), None if residual is None else residual.view(-1, x.size(-1))
    for part in () if skips_pieces(x) else slices(flat, rows):
        made = forward(flat[part], weight, bias, arguments, None if other is None else other[part])
        for result, each in zip(results, made, strict=True):
            if result is not None and each is not None:
                result[part] = each
        del made, each  # before the next part is computed
    # Return aliases with version 0: a tensor that counts as changed in place would not be recomputed.
    return None if y is None else y.data, x if x_hat is None else x_hat.data, rstd.data


def recompute_output(x_hat: Tensor, weight: Tensor | None, bias: Tensor | None, arguments: NormArguments) -> Tensor:
    """y from the saved x_hat, or from x in its place."""
    if arguments.keeps_input:
        y, *_ = forward(x_hat, weight, bias, arguments)
        assert y is not None
        return y
    if weight is None and bias is None and not arguments.casts:
        return x_hat
    if runs_triton(x_hat, weight, bias):
        made: Tensor = _kernels().launch_affine(x_hat, weight, bias, arguments)
        return made
    return _affine(x_hat, weight, bias, arguments)


def backward(
    dy: Tensor,
    x_hat: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    arguments: NormArguments,
    needs: tuple[bool, bool, bool],
    dtype: torch.dtype = torch.float32,
) -> Gradients:
    """dx in the dtype of x; dweight and dbias in the dtype of rstd, or in `dtype` if a Triton kernel runs; None if not
    needed."""
    if runs_triton(dy, x_hat, weight):
        gradients: Gradients = _kernels().launch_backward(dy, x_hat, rstd, weight, arguments, needs, dtype)
        return gradients
    rows = _parts(dy, x_hat)
    if rows is None:
        dx, dweight, dbias = norm_backward(dy, x_hat, rstd, weight, arguments.spec, needs, arguments.keeps_input)
        return (None if dx is None else dx.to(arguments.x_dtype)), dweight, dbias
    whole = dy.new_empty(dy.shape, dtype=arguments.x_dtype) if needs[0] else None
    if skips_pieces(dy):  # as with Triton kernels, nothing else is allocated
        dweight, dbias = (rstd.new_empty(dy.size(-1)) if need else None for need in needs[1:])
        return whole, dweight, dbias
    sums: list[Tensor | None] = [None, None]
    flat = [tensor.view(-1, tensor.size(-1)) for tensor in (dy, x_hat, rstd)]
    for part in slices(flat[0], rows):
        here, its_x_hat, its_rstd = (tensor[part] for tensor in flat)
        dx, *of_rows = norm_backward(here, its_x_hat, its_rstd, weight, arguments.spec, needs, arguments.keeps_input)
        if whole is not None and dx is not None:
            whole.view(-1, whole.size(-1))[part] = dx
        sums = [
            each if total is None or each is None else total + each for total, each in zip(sums, of_rows, strict=True)
        ]
    return None if whole is None else whole.data, sums[0], sums[1]


def _affine(x_hat: Tensor, weight: Tensor | None, bias: Tensor | None, arguments: NormArguments) -> Tensor:
    return affine(x_hat, weight, bias, arguments.spec, arguments.x_dtype, arguments.dtype)


@torch.library.custom_op("memopt::ms_norm", mutates_args=())
def ms_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: str,
    eps: float,
    offset: int,
    cast_order: str,
    dtype: torch.dtype,
    kept_dtype: torch.dtype,
    residual: Tensor | None = None,
) -> list[Tensor]:
    """The norm of x (+ residual): y in `dtype`, x_hat in `kept_dtype` and rstd. Without an affine y is x_hat, and there
    are only two results, y and rstd."""
    bare = weight is None and bias is None
    arguments = NormArguments(_spec(kind, eps, offset, cast_order), x.dtype, dtype, dtype if bare else kept_dtype)
    y, x_hat, rstd = forward(x, weight, bias, arguments, residual)
    return [*(_promised(x, kind, each) for each in (y, x_hat) if each is not None), rstd.contiguous()]


@torch.library.custom_op("memopt::ms_norm_backward", mutates_args=())
def ms_norm_backward(
    dy: Tensor,
    x_hat: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    kind: str,
    offset: int,
    needs: list[bool],
    x_dtype: torch.dtype,
) -> list[Tensor]:
    """The gradients among dx, dweight and dbias that `needs` selects, in this order."""
    arguments = NormArguments(_spec(kind, 0.0, offset), x_dtype, dy.dtype, x_hat.dtype)
    dx, dweight, dbias = backward(dy, x_hat, rstd, weight, arguments, (needs[0], needs[1], needs[2]))
    if dx is not None:
        dx = _promised(x_hat, "rms", dx)
    return [gradient for gradient in (dx, dweight, dbias) if gradient is not None]


@ms_norm.register_fake
def _(x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: str, *options: Any) -> list[Tensor]:
    _, _, _, dtype, kept_dtype, *_ = options
    dtypes = (dtype,) if weight is None and bias is None else (dtype, kept_dtype)
    return [*(_like(x, kind, each) for each in dtypes), _fake_rstd(x)]


@ms_norm_backward.register_fake
def _(dy: Tensor, x_hat: Tensor, rstd: Tensor, *options: Any) -> list[Tensor]:
    *_, needs, x_dtype = options
    dx = [_like(x_hat, "rms", x_dtype)] if needs[0] else []
    return dx + [rstd.new_empty(x_hat.size(-1)) for need in needs[1:] if need]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weight, bias, ctx.kind, _, ctx.offset, *_ = inputs
    *_, x_hat, rstd = output
    ctx.dtypes = tuple(None if tensor is None else tensor.dtype for tensor in (x, weight, bias))
    ctx.save_for_backward(x_hat, rstd, weight)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, incoming: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    # Compilers leave out arguments that were left at their default.
    given = (*ctx.needs_input_grad, False)
    (x_needs, weight_needs, bias_needs), residual_needs = given[:3], given[9]
    needs = [x_needs or residual_needs, weight_needs, bias_needs]
    gradients: list[Tensor | None] = [None, None, None]
    if incoming[0] is not None:
        x_hat, rstd, weight = ctx.saved_tensors
        made = iter(ms_norm_backward(incoming[0], x_hat, rstd, weight, ctx.kind, ctx.offset, needs, ctx.dtypes[0]))
        gradients = [next(made).to(dtype) if need else None for need, dtype in zip(needs, ctx.dtypes, strict=True)]
    dx, *of_parameters = gradients
    of_both_terms = dx if x_needs else None, *of_parameters, *(None,) * 6, dx if residual_needs else None
    return of_both_terms[: len(ctx.needs_input_grad)]


ms_norm.register_autograd(_differentiate, setup_context=_keep)


def _spec(kind: str, eps: float, offset: int = 0, cast_order: str = "after") -> NormSpec:
    # An operator's schema cannot have dataclasses or literal types.
    return NormSpec(kind, eps, offset, cast_order)  # type: ignore[arg-type]


def _like(x: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype) if kind == "rms" else x.new_empty(x.shape, dtype=dtype)


def _fake_rstd(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], 1), dtype=accumulation_dtype(x.dtype))


def _promised(x: Tensor, kind: str, result: Tensor) -> Tensor:
    """`result` with the strides that the fake kernels promise."""
    promised = _like(x, kind, result.dtype)
    return result if result.stride() == promised.stride() else promised.copy_(result)
