"""Limits for the ratio of two implementations' errors, above which the ratio is too large to be chance.

Two correct implementations round differently. Each error is a sum of n independent roundings, so the square of the
ratio of the errors follows F(n, n). The limit is the root of a quantile, times the factor by which a correct
implementation may be less accurate (`SYSTEMATIC`). docs/verify.md explains it.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

#: FlashAttention's tests and PyTorch's benchmark harness allow twice the error of stock, too.
SYSTEMATIC = 2.0
#: Quantiles that one ratio in 10^9 exceeds: for a model of a thousand parameters, one false alarm in 10^6
#: verifications. Independent errors n -> square root of the quantile of F(n, n), and of F(n, 4 n) for four stock runs.
_QUANTILES = {
    1: (math.inf, 279.0), 2: (math.inf, 26.6), 3: (math.inf, 12.2), 4: (math.inf, 8.11), 6: (46.5, 5.31),
    8: (20.8, 4.21), 12: (9.29, 3.24), 16: (6.18, 2.79), 24: (4.05, 2.34), 32: (3.23, 2.10), 48: (2.53, 1.85),
    64: (2.21, 1.72), 96: (1.89, 1.565), 128: (1.73, 1.48), 256: (1.47, 1.33), 512: (1.31, 1.23), 1024: (1.21, 1.16),
    4096: (1.10, 1.08), 16384: (1.05, 1.04),
}  # fmt: skip
STOCK_RUNS = 4


def rms(tensor: Tensor) -> float:
    """Root of the mean square, in fp64."""
    return float(tensor.double().square().mean().sqrt()) if tensor.numel() else 0.0


def independent_errors(error: Tensor, limit: int) -> int:
    """The number of independent terms that the elements of `error` amount to, at most `limit`. (sum of e^2)^2 / sum of
    e^4 is a third of the number of normal errors of one size. If a few errors are much larger (outlier channels), only
    these count."""
    squares = error.double().square()
    fourth = float(squares.square().sum())
    if not fourth > 0:
        return min(limit, error.numel())
    return min(limit, error.numel(), round(3 * float(squares.sum()) ** 2 / fourth))


def independent_in_rank(error: Tensor) -> float:
    """How many independent terms a matrix of errors can have by its rank: (sum of s^2)^2 / sum of s^4 directions, for
    its singular values s, each with the independent terms of rows or of columns, whichever are fewer. If all tokens are
    nearly alike, the error of a weight's gradient is one vector times one row of inputs. Infinite for no matrix."""
    if error.dim() != 2 or not error.any():
        return math.inf
    square = error.double() if error.shape[0] <= error.shape[1] else error.double().t()
    gram = square @ square.t()
    directions = float(gram.trace() ** 2 / gram.square().sum())
    sizes = (error.double().square().sum(dim).sqrt() for dim in (0, 1))
    return directions * min(independent_errors(each, each.numel()) for each in sizes)


def chance_ratio(independent: int, stock_runs: int = 1) -> float:
    """The largest ratio of an RMS error of `independent` terms to that of 1 or 4 stock runs, if both implementations
    are equally accurate; the limit is `SYSTEMATIC` times that."""
    known = bisect.bisect_right(list(_QUANTILES), max(independent, 1)) - 1
    return list(_QUANTILES.values())[known][stock_runs == STOCK_RUNS]


def typical_errors(errors: Mapping[str, float], truth: Mapping[str, Tensor]) -> dict[str, float]:
    """Name -> the median of the relative `errors` of all tensors of its kind, with equal last name and rank. A median
    is used because the stock model may be right by luck in one parameter."""
    kinds: dict[tuple[str, int], list[float]] = {}
    for name, error in errors.items():
        kinds.setdefault(_kind(name, truth[name]), []).append(error)
    medians = {kind: statistics.median(members) for kind, members in kinds.items()}
    return {name: medians[_kind(name, truth[name])] for name in errors}


def _kind(name: str, tensor: Tensor) -> tuple[str, int]:
    return name.rpartition(".")[2], tensor.dim()


def fewest_elements(tensors: Iterable[Tensor]) -> int:
    """Elements of the smallest of `tensors`; a result that is computed from it has no more independent errors."""
    return min((tensor.numel() for tensor in tensors if tensor.numel()), default=torch.iinfo(torch.int64).max)
