"""Functions that make a few numbers of each row of logits: cross-entropy, the likeliest token, entropy.

They run by chunks, so the logits are never whole.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt.kernels.base.autograd import autocast_as, autocast_dtype
from memopt.patches.loss.blocks import Rules, by_blocks, runs_by_blocks
from memopt.patches.loss.lazy import LazyLogits, Source
from memopt.patches.loss.operations import handles, is_last
from memopt.patches.loss.rows import by_rows

#: Function -> position of its argument ``dim``.
_REDUCTIONS = {
    "argmax": 0, "argmin": 0, "max": 0, "min": 0, "amax": 0, "amin": 0, "logsumexp": 0, "sum": 0, "mean": 0,
    "topk": 1, "gather": 0, "take_along_dim": 1,
}  # fmt: skip


def cross_entropy(
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
    plain = isinstance(logits, LazyLogits) and not isinstance(target, LazyLogits) and isinstance(target, Tensor)
    if not plain or logits.dim() != 2 or not (size_average is None and reduce is None):
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
        return NotImplemented  # the stock function says what is wrong
    rules = Rules(weight, ignore_index, label_smoothing)
    losses = soft_losses(logits.source, target, rules) if soft else row_losses(logits.source, target, rules)
    dtype = _dtype_of_loss(logits.dtype, autocast_dtype(logits), logits.device)
    if reduction == "none":
        return losses.to(dtype)
    total = losses.sum()
    if reduction == "mean":
        total = total / _weight_of_all(target, rules, total) if not soft else total / len(target)
    return total.to(dtype)


def row_losses(source: Source, target: Tensor, rules: Rules) -> Tensor:
    """The loss of each row, not reduced: (rows,) in fp32, or fp64 for fp64 logits; 0 where the target is ignored.

    Args:
        source: what the logits (rows, V) are computed from.
        target: (rows,) int64.
    """
    if _ends_in_log_softmax(source):
        source = dataclasses.replace(source, operations=source.operations[:-1])
    # The loss is computed in fp32 whatever the logits are, so a cast before it changes nothing.
    while source.operations and source.operations[-1].casts_up:
        source = dataclasses.replace(source, operations=source.operations[:-1])
    # Ignored rows never reach the head.
    kept = (target != rules.ignore_index).nonzero().squeeze(1) if _has_values(target) else None
    if kept is not None and len(kept) == len(target):
        kept = None
    if runs_by_blocks(source):
        return by_blocks(source, target, kept, rules)
    used = dataclasses.replace(source, x=source.x if kept is None else source.x[kept])
    labels = target if kept is None else target[kept]
    (losses,) = by_rows(used, rules.losses, (labels,))
    return losses if kept is None else losses.new_zeros(len(target)).index_copy(0, kept, losses)


def soft_losses(source: Source, target: Tensor, rules: Rules) -> Tensor:
    """The same for probabilities of the classes: `target` is (rows, V)."""
    return by_rows(source, rules.losses, (target,))[0]


def _weight_of_all(target: Tensor, rules: Rules, total: Tensor) -> Tensor:
    kept = target != rules.ignore_index
    if rules.weight is None:
        return kept.sum().to(total.dtype)
    return rules.weight.to(total.dtype)[target.masked_fill(~kept, 0)].mul(kept).sum()


def _ends_in_log_softmax(source: Source) -> bool:
    return bool(source.operations) and source.operations[-1].name == "log_softmax"


def _has_values(tensor: Tensor) -> bool:
    """Whether how many rows are ignored can be known: not of fake tensors, nor while a graph is captured."""
    if tensor.is_meta or type(tensor) is not Tensor:
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


@functools.cache
def _dtype_of_loss(dtype: torch.dtype, autocast: torch.dtype | None, device: torch.device) -> torch.dtype:
    """That of the stock loss: autocast computes it in fp32."""
    with torch.no_grad():
        target = torch.zeros(1, dtype=torch.long, device=device)
        return F.cross_entropy(torch.zeros((1, 2), dtype=dtype, device=device), target).dtype


@handles("cross_entropy")
def _cross_entropy(function: Any, name: str) -> Callable[..., Any]:
    return cross_entropy


@handles("nll_loss")
def _nll_loss(function: Any, name: str) -> Callable[..., Any]:
    def handler(logits: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        # The cross-entropy of log-probabilities is their negative log-likelihood.
        names = ("weight", "size_average", "ignore_index", "reduce", "reduction")
        if not isinstance(logits, LazyLogits) or not _ends_in_log_softmax(logits.source):
            return NotImplemented
        return cross_entropy(logits, target, **dict(zip(names, args, strict=False)), **kwargs)

    return handler


@handles(" ".join(_REDUCTIONS))
def _reduction(function: Any, name: str) -> Callable[..., Any]:
    position = _REDUCTIONS[name]

    def handler(logits: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(logits, LazyLogits):
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
        # An index for each row; no other tensor.
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
        results = [each.reshape(*leading, *each.shape[1:]) for each in by_rows(logits.source, finish, rows)]
        if len(results) == 1:
            return results[0]
        return getattr(torch.return_types, name)(results)

    return handler
