"""Functions that compute a few numbers from each row of logits: cross-entropy, the likeliest token, entropy.

They run by chunks, so that all logits are never in memory at once.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt.kernels.base.autograd import accumulation_dtype, autocast_as, autocast_dtype
from memopt.kernels.loss.function import lean_cross_entropy, weight_of_all
from memopt.kernels.loss.reference import LossArguments, losses_of
from memopt.patches.loss.lazy import LazyLogits
from memopt.patches.loss.losses import gradient_waits, loss_at_once, losses_by_blocks
from memopt.patches.loss.operations import handles, is_last
from memopt.patches.loss.plain import Plain, is_plain
from memopt.patches.loss.rows import LOGIT_BYTES, by_rows, is_on_gpu
from memopt.patches.loss.source import Source, versions_of
from memopt.torch_compat import known_values, no_dispatch

#: Function -> position of its argument ``dim``.
_REDUCTIONS = {
    "argmax": 0, "argmin": 0, "max": 0, "min": 0, "amax": 0, "amin": 0, "logsumexp": 0, "sum": 0, "mean": 0,
    "topk": 1, "gather": 0, "take_along_dim": 1,
}  # fmt: skip


@handles("cross_entropy")
def _cross_entropy(
    function: Any,
    name: str,
    logits: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """`torch.nn.functional.cross_entropy` of logits that were not computed."""
    given = isinstance(logits, LazyLogits) and not isinstance(target, LazyLogits) and isinstance(target, Tensor)
    if not given or logits.dim() != 2 or not (size_average is None and reduce is None):
        return NotImplemented
    if reduction not in ("none", "mean", "sum") or target.device != logits.device:
        return NotImplemented
    if weight is not None and (weight.requires_grad or weight.shape != logits.shape[1:]):
        return NotImplemented
    soft = target.is_floating_point()
    if target.requires_grad or target.shape != (logits.shape if soft else logits.shape[:1]):
        return NotImplemented
    if not soft and target.dtype != torch.long:
        return NotImplemented
    if not 0.0 <= label_smoothing <= 1.0:
        return NotImplemented  # the stock function raises the right error
    arguments = LossArguments(weight, label_smoothing, ignore_index)
    forms = tuple(None if each is None else each.dtype for each in (logits, target, weight))
    dtype = _dtype_of_loss(*forms, label_smoothing, autocast_dtype(logits), logits.device)
    loss: Tensor = logits.source.in_call(lambda source: _loss(source, target, arguments, reduction))
    return loss.to(dtype)


def _loss(source: Source, target: Tensor, arguments: LossArguments, reduction: str) -> Tensor:
    soft = target.is_floating_point()
    source.check(values=not source.head.records)
    if source.head.lean and not soft:
        with torch.set_grad_enabled(source.tracked and torch.is_grad_enabled()):
            options: Any = {**vars(arguments), "reduction": reduction}
            return lean_cross_entropy(_before_the_loss(source).whole(), target, **options)
    if soft:
        losses = _by_rows(source, target, arguments)
        divisor: Tensor | float = float(len(target))
    else:
        wide = accumulation_dtype(source.dtype)
        divisor = weight_of_all(target, arguments, wide) if reduction == "mean" else source.x.new_ones((), dtype=wide)
        # Drop ignored rows before the head. Not on a GPU, where counting them would synchronise: there their loss is 0.
        kept = None if is_on_gpu(source.x) else _counted(target, arguments.ignore_index)
        count, source = len(target), _before_the_loss(source)
        if kept is not None:
            target, chosen = target[kept], source.x[kept]
            source = dataclasses.replace(source, x=chosen, versions=versions_of((chosen,)))
        plain = Plain(source, arguments) if is_plain(source) else None
        if plain is not None and reduction != "none" and plain.is_at_once and not gradient_waits(source):
            return loss_at_once(plain, target, 1 / divisor)
        losses = _by_rows(source, target, arguments) if plain is None else losses_by_blocks(plain, target)
        if kept is not None and reduction == "none":
            losses = losses.new_zeros(count).index_copy(0, kept, losses)
    if reduction == "none":
        return losses
    return losses.sum() / divisor if reduction == "mean" else losses.sum()


def _before_the_loss(source: Source) -> Source:
    """`source` without operations at its end that do not change the loss: a log_softmax, casts to a wider dtype."""
    operations = list(source.operations)
    if _ends_in_log_softmax(source):
        operations.pop()
    while operations and operations[-1].casts_up:
        operations.pop()
    return dataclasses.replace(source, operations=tuple(operations))


def _by_rows(source: Source, target: Tensor, arguments: LossArguments) -> Tensor:
    """The loss of each row of logits (rows, V), not reduced: (rows,) in fp32, or fp64 for fp64 logits; 0 where the
    target is ignored. `target` is int64 (rows,), or probabilities (rows, V)."""

    def finish(y: Tensor, t: Tensor) -> tuple[Tensor]:
        if t.is_floating_point():
            return (losses_of(y, t, arguments),)
        options: Any = {**vars(arguments), "reduction": "none"}
        return (lean_cross_entropy(y, t, **options),)

    # For class targets without operations, memory holds only a logit and its gradient.
    narrow = not target.is_floating_point() and not source.operations
    of_logit = 2 * (source.head.autocast or source.x.dtype).itemsize if narrow else LOGIT_BYTES
    return by_rows(source, finish, (target,), of_logit)[0]


def _ends_in_log_softmax(source: Source) -> bool:
    return bool(source.operations) and source.operations[-1].name == "log_softmax"


def _counted(target: Tensor, ignore_index: int) -> Tensor | None:
    """Indices of the rows that are not ignored; None if all rows count, or if the target cannot be read."""
    values = known_values(target)
    if values is not None:  # in a trace, which needs only the number of indices
        with no_dispatch():
            count = int((values != ignore_index).sum())
        kept = target.new_empty(count, 1)
    elif _has_values(target):
        kept = (target != ignore_index).nonzero()
    else:
        return None
    return None if len(kept) == len(target) else kept.squeeze(1)


def _has_values(tensor: Tensor) -> bool:
    """Whether the values can be read: not of meta or fake tensors, nor during the capture of a CUDA graph."""
    if tensor.is_meta or type(tensor) is not Tensor:
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


@functools.cache
def _dtype_of_loss(
    logits: torch.dtype,
    target: torch.dtype,
    weight: torch.dtype | None,
    label_smoothing: float,
    autocast: torch.dtype | None,
    device: torch.device,
) -> torch.dtype:
    """The dtype of the stock loss of tensors of these dtypes, or its error: autocast computes it in fp32."""
    with torch.no_grad(), no_dispatch():  # hidden from modes that count allocations: only the first step computes it
        row = torch.zeros((1, 2), dtype=logits, device=device)
        labels = torch.zeros((1, 2) if target.is_floating_point else (1,), dtype=target, device=device)
        weights = None if weight is None else torch.ones(2, dtype=weight, device=device)
        return F.cross_entropy(row, labels, weights, label_smoothing=label_smoothing).dtype


@handles("nll_loss")
def _nll_loss(function: Any, name: str, logits: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    # The cross-entropy of log-probabilities is their negative log-likelihood.
    names = ("weight", "size_average", "ignore_index", "reduce", "reduction")
    if not isinstance(logits, LazyLogits) or not _ends_in_log_softmax(logits.source):
        return NotImplemented
    return _cross_entropy(function, name, logits, target, **dict(zip(names, args, strict=False)), **kwargs)


@handles("kl_div")
def _kl_div(
    function: Any,
    name: str,
    logits: Any,
    target: Any = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Any:
    """`torch.nn.functional.kl_div` to probabilities of the same shape, those of a teacher, say."""
    given = isinstance(logits, LazyLogits) and isinstance(target, Tensor) and not isinstance(target, LazyLogits)
    if function is not F.kl_div or not given or target.shape != logits.shape or target.requires_grad:
        return NotImplemented
    if not (size_average is None and reduce is None and reduction in ("sum", "mean", "batchmean")):
        return NotImplemented
    autocast = autocast_dtype(logits)
    dtype = torch.promote_types(logits.dtype, target.dtype)
    summed = accumulation_dtype(dtype)

    def finish(y: Tensor, others: Tensor) -> tuple[Tensor]:
        with autocast_as(autocast, y):
            each = F.kl_div(y, others, reduction="none", log_target=log_target)
        return (each.sum(-1, keepdim=True, dtype=summed),)

    (sums,) = by_rows(logits.source, finish, [target.reshape(-1, target.shape[-1])])
    count = {"sum": 1, "mean": target.numel(), "batchmean": logits.shape[0]}[reduction]
    return (sums.sum() / count).to(dtype if autocast is None else summed)


@handles(" ".join(_REDUCTIONS))
def _reduction(function: Any, name: str, logits: Any, *args: Any, **kwargs: Any) -> Any:
    position = _REDUCTIONS[name]
    if not isinstance(logits, LazyLogits) or not logits.source.head.records:
        return NotImplemented
    given = dict(kwargs)
    if len(args) > position:
        dim = args[position]
        args = (*args[:position], -1, *args[position + 1 :])
    else:
        dim = given.pop("dim", -1 if name == "topk" else None)
        given["dim"] = -1
    if not is_last(dim, logits):
        return NotImplemented
    # Accept only tensors with one row for each row of the logits, e.g. indices.
    tensors = [value for value in (*args, *given.values()) if isinstance(value, Tensor)]
    *leading, _ = logits.shape
    if any(list(value.shape[:-1]) != leading or isinstance(value, LazyLogits) for value in tensors):
        return NotImplemented
    autocast = autocast_dtype(logits)

    def finish(y: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
        left = list(rows)
        swap = [left.pop(0) if isinstance(value, Tensor) else value for value in args]
        named = {key: left.pop(0) if isinstance(value, Tensor) else value for key, value in given.items()}
        with autocast_as(autocast, y):
            result = function(y, *swap, **named)
        return (result,) if isinstance(result, Tensor) else tuple(result)

    rows = [value.reshape(-1, value.shape[-1]) for value in tensors]
    source = logits.source
    source.read.append(name)
    found = by_rows(source, finish, rows, rows=source.product_rows)
    results = [each.reshape(*leading, *each.shape[1:]) for each in found]
    if len(results) == 1:
        return results[0]
    return getattr(torch.return_types, name)(results)
