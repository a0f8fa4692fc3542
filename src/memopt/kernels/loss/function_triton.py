"""Triton kernels of cross-entropy by rows: loss and statistics in one read, the gradient in one read and one write."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from memopt.kernels.base.launch import LaunchConfig, launch_config
from memopt.kernels.base.tiles_triton import on_device_of
from memopt.kernels.loss.reference import LossArguments

_VECTOR_BYTES = 16


@triton.jit(do_not_specialize=["ignore_index"])
def loss_forward_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, target_ptr, picked_ptr, weight_ptr, weight_sum_ptr, loss_ptr, lse_ptr,
    classes, stride, ignore_index, smoothing,
    WEIGHTED: tl.constexpr, SMOOTHING: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """One row a program. A maximum and a sum for each lane of VECTOR elements, which one thread reads: the loop has no
    barrier, and little more than one exponential for each element."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row).to(tl.int64)
    kept = target != ignore_index
    picked = tl.load(picked_ptr + row).to(tl.float32)
    # Any finite number does; near the row's values it keeps the digits of their sum.
    shift = tl.where(tl.abs(picked) < float("inf"), -picked, 0.0)
    col = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    top = tl.full((LANES,), float("-inf"), tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    shifted = tl.zeros((LANES,), tl.float32)
    for start in range(0, tl.where(kept, classes, 0), LANES * VECTOR):
        inside = start + col < classes
        x = tl.load(logits_ptr + row * stride + start + col, mask=inside, other=float("-inf")).to(tl.float32)
        above = tl.maximum(top, tl.max(x, axis=1))
        # A lane that saw nothing but -inf: -inf - -inf would be NaN.
        base = tl.where(above == float("-inf"), 0.0, above)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(x - base[:, None]), axis=1)
        top = above
        if SMOOTHING:
            term = x - shift
            if WEIGHTED:
                term *= tl.load(weight_ptr + start + col, mask=inside, other=0.0)
            shifted += tl.sum(tl.where(inside, term, 0.0), axis=1)
    of_row = tl.max(top, axis=0)
    base = tl.where(of_row == float("-inf"), 0.0, of_row)
    log_sum = tl.log(tl.sum(total * tl.exp(top - base), axis=0))
    loss = log_sum + (of_row + picked)
    if WEIGHTED:
        loss *= tl.load(weight_ptr + target, mask=kept & (target >= 0) & (target < classes), other=0.0)
    if SMOOTHING:
        uniform = (log_sum + (of_row - shift)) * tl.load(weight_sum_ptr) - tl.sum(shifted, axis=0)
        loss = (1 - smoothing) * loss + smoothing / classes * uniform
    tl.store(loss_ptr + row, tl.where(kept, loss, 0.0))
    tl.store(lse_ptr + row * 2, of_row)
    tl.store(lse_ptr + row * 2 + 1, log_sum)


@triton.jit(do_not_specialize=["ignore_index"])
def loss_backward_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, target_ptr, lse_ptr, dloss_ptr, weight_ptr, weight_sum_ptr, out_ptr,
    classes, stride, out_stride, ignore_index, smoothing,
    WEIGHTED: tl.constexpr, SMOOTHING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A piece of one row a program. `out` may be the logits: every element is read and written by one thread."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < classes
    target = tl.load(target_ptr + row).to(tl.int64)
    kept = target != ignore_index
    dloss = tl.load(dloss_ptr + row)
    of_target = dloss
    if WEIGHTED:
        of_target *= tl.load(weight_ptr + target, mask=kept & (target >= 0) & (target < classes), other=0.0)
    if SMOOTHING:
        of_target *= 1 - smoothing
    x = tl.load(logits_ptr + row * stride + col, mask=inside & kept, other=0.0).to(tl.float32)
    p = tl.exp((x - tl.load(lse_ptr + row * 2)) - tl.load(lse_ptr + row * 2 + 1))
    dx = of_target * tl.where(col == target, p - 1, p)
    if SMOOTHING:
        weight = 1.0
        if WEIGHTED:
            weight = tl.load(weight_ptr + col, mask=inside, other=0.0)
        dx += dloss * smoothing / classes * (tl.load(weight_sum_ptr) * p - weight)
    dx = tl.where(kept, dx, 0.0)
    tl.store(out_ptr + row * out_stride + col, dx.to(out_ptr.dtype.element_ty), mask=inside)


def launch_loss(logits: Tensor, target: Tensor, picked: Tensor, arguments: LossArguments) -> tuple[Tensor, Tensor]:
    """As `memopt.kernels.loss.reference.rows_loss`.

    Moves logits.element_size() bytes per element in, once, which is the floor; rows that are ignored are not read.
    """
    logits = _in_rows(logits)
    rows, classes = logits.shape
    loss = logits.new_empty(rows, dtype=torch.float32)
    lse = logits.new_empty(rows, 2, dtype=torch.float32)
    if logits.numel():
        config = _config("loss_forward", logits)
        vector = _VECTOR_BYTES // logits.element_size()
        weight, weight_sum = _weights(arguments, loss, classes)
        with on_device_of(logits):
            loss_forward_kernel[(rows,)](
                logits, target.contiguous(), picked.contiguous(), weight, weight_sum, loss, lse,
                classes, logits.stride(0), arguments.ignore_index, arguments.label_smoothing,
                LANES=max(1, config.block // vector), VECTOR=vector, **_meta(arguments, config),
            )  # fmt: skip
    return loss, lse


def launch_gradient(
    logits: Tensor, target: Tensor, lse: Tensor, dloss: Tensor, arguments: LossArguments, out: Tensor
) -> Tensor:
    """As `memopt.kernels.loss.reference.rows_gradient`.

    Moves the logits in and the gradient out, once each, which is the floor.
    """
    if _in_rows(out) is not out:
        return out.copy_(launch_gradient(logits, target, lse, dloss, arguments, torch.empty_like(out).contiguous()))
    logits = _in_rows(logits)
    rows, classes = logits.shape
    if logits.numel():
        config = _config("loss_backward", logits)
        dloss = dloss.to(torch.float32).contiguous()
        weight, weight_sum = _weights(arguments, lse, classes)
        with on_device_of(logits):
            loss_backward_kernel[(rows, triton.cdiv(classes, config.block))](
                logits, target.contiguous(), lse, dloss, weight, weight_sum, out,
                classes, logits.stride(0), out.stride(0), arguments.ignore_index, arguments.label_smoothing,
                BLOCK=config.block, **_meta(arguments, config),
            )  # fmt: skip
    return out


def _in_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.size(1) == 1 or tensor.stride(1) == 1 else tensor.contiguous()


def _config(kernel: str, logits: Tensor) -> LaunchConfig:
    classes = logits.size(1)
    config = launch_config(kernel, classes, logits.dtype)
    least = _VECTOR_BYTES // logits.element_size()
    return LaunchConfig(1, max(least, min(config.block, triton.next_power_of_2(classes))), config.num_warps)


def _weights(arguments: LossArguments, like: Tensor, classes: int) -> tuple[Tensor | None, Tensor | None]:
    """The classes' weights in fp32 and, where smoothing asks for it, their sum."""
    weight = None if arguments.weight is None else arguments.weight.to(torch.float32).contiguous()
    if not arguments.label_smoothing:
        return weight, None
    return weight, like.new_full((), classes) if weight is None else weight.sum()


def _meta(arguments: LossArguments, config: LaunchConfig) -> dict[str, int | bool]:
    return {
        "WEIGHTED": arguments.weight is not None,
        "SMOOTHING": bool(arguments.label_smoothing),
        "num_warps": config.num_warps,
        "enable_fp_fusion": True,
    }
