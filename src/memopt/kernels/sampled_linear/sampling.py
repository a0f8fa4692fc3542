"""Chooses rows of a linear's input to save, such that the weight gradient computed from them is unbiased.

    dW = sum_i dy_i^T x_i   ~   sum_j weight_j * dy[row_j]^T x[row_j]       (n rows, k of them saved)

Row i has a score w_i, at best |x_i| |dy_i|. The c largest are certain: always taken, with weight 1. R is the sum of the
other scores; k - c of those rows are drawn:

| method | c | the others are drawn | with weight |
|---|---|---|---|
| crs | 0 | with replacement, in proportion to w | R / ((k - c) w_i) |
| wta-crs | argmin R / (k - c) | with replacement, in proportion to w | the same |
| systematic | as many as have w_i (k - c) >= R | where u, u + 1, ... fall in the cumulated w (k - c) / R | the same |
| uniform | 0 | without replacement, all that have a score alike | their number / k |

CRS is Drineas, Kannan and Mahoney's (SIAM J. Comput. 36, 2006), WTA-CRS is https://arxiv.org/abs/2305.15265 (Theorems 1
and 2, and the rule for c), systematic sampling with unequal probabilities is Madow's (Ann. Math. Stat. 20, 1949) with
Horvitz and Thompson's weights. This file has the samplers and their expected errors, as functions of tensors.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

Method = Literal["wta-crs", "systematic", "crs", "uniform"]
METHODS: tuple[Method, ...] = get_args(Method)

#: Relative tolerance of a budget: 0.07 * 100 is 7 rows, though the product of the floats is above 7.
_DIGITS = 1e-9
#: Scores are rounded up to whole numbers with a sum of about this. Such sums are exact in any order, so equal scores
#: give equal rows on a device whose order of addition varies. Weights are computed from the rounded scores.
_UNITS = 2.0**48
#: Most offsets at which the error of systematic sampling is evaluated; and most rows of products in memory at a time.
_OFFSETS, _ROWS = 1024, 1024


def rows_kept(rows: int, budget: float) -> int:
    """k = ceil(budget * rows): at least one of the `rows`, if there are any, and at most all.

    Raises:
        ValueError: `budget` is not in (0, 1], or `rows` is negative.
    """
    if not 0 < budget <= 1 or rows < 0:
        raise ValueError(f"budget must be in (0, 1] and rows must not be negative, not {budget!r} and {rows!r}")
    return min(rows, math.ceil(budget * rows * (1 - _DIGITS)))


def sample_rows(
    scores: Tensor, k: int, method: Method, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """k rows and their weights; the sum above is unbiased where each row with a nonzero term has a score > 0.

    Where at most k rows have a score > 0, the sum is exact: those rows have weight 1, the others of the k weight 0. A
    row with score 0 always has weight 0. A score that is negative or not finite makes every weight NaN. Only ratios of
    scores matter. Scores below n / 2**48 of the largest are drawn as if they were that large, with the weight of that;
    below 1e-300 they count as 0.

    The number of random numbers depends on n, k and `method` alone, and nothing synchronises with the device. Under
    ``torch.compile`` the generator must be None, since a graph cannot hold one. Systematic sampling takes the rows in
    their order, so the k rows are spread over the batch.

    Args:
        scores: (n,), any floating dtype, n < 2**31.
        k: number of rows, possibly more than n.
        generator: of the device of `scores`; None for the default one.

    Returns:
        Indices, int32 (k,), each in [0, n) whatever the scores are; weights, fp32 (k,).

    Raises:
        ValueError: `scores` is no vector of floats, `k` is negative or not 0 if n is 0, or `method` is unknown.
    """
    _check(scores, k, method)
    w, sound = _scaled(scores)
    n = w.numel()
    if k >= n or not k:
        slot = torch.arange(k, device=w.device)
        rows = slot.clamp(max=max(n - 1, 0))
        weights = ((w.index_select(0, rows) > 0) & (slot < n)).to(w.dtype)
    elif method == "uniform":
        rows, weights = _uniform(w, k, generator)
    else:
        rows, weights = _by_score(w, k, method, generator)
    return rows.to(torch.int32), weights.where(sound, torch.nan).to(torch.float32)


def expected_error(x: Tensor, dy: Tensor, scores: Tensor, k: int, method: Method) -> float:
    """Relative root mean square error of the estimate, sqrt(E |estimate - dW|^2) / |dW| (Frobenius norms).

    0 if the estimate is exact or dW is 0; NaN where a score is negative or not finite. The terms of rows with score
    0 are missing in every estimate and count as error.

    The mean over the draws is a formula. For systematic sampling, which has one random number u, it is the mean over
    the intervals of u in which the same rows are drawn, or over 1024 equally spaced u if those are fewer. That takes
    O(n^2) time and O(n) memory; the others take two products of the size of dW.

    Args:
        x: (n, in).
        dy: (n, out).
        scores, k, method: as in :func:`sample_rows`.

    Raises:
        ValueError: as :func:`sample_rows`, or the numbers of rows differ.
    """
    _check(scores, k, method)
    if x.dim() != 2 or dy.dim() != 2 or not len(x) == len(dy) == len(scores):
        raise ValueError(f"x {tuple(x.shape)}, dy {tuple(dy.shape)} and scores {tuple(scores.shape)} must have n rows")
    w, sound = _scaled(scores)
    if not bool(sound):
        return math.nan
    x, dy = x.detach().double(), dy.detach().double()
    truth = _square(x.t() @ dy)
    if not truth:
        return 0.0
    drawn = w > 0
    left_out = _square(x[~drawn].t() @ dy[~drawn])
    if int(drawn.sum()) <= k:
        return math.sqrt(left_out / truth)
    x, dy, w = x[drawn], dy[drawn], w[drawn]
    if method == "uniform":
        variance = _variance_of_uniform(x, dy, w, k)
    elif method == "systematic":
        variance = _variance_of_systematic(x, dy, w, k)
    else:
        variance = _variance_with_replacement(x, dy, w, k, method)
    return math.sqrt((max(variance, 0.0) + left_out) / truth)


def _check(scores: Tensor, k: int, method: str) -> None:
    if scores.dim() != 1 or not scores.is_floating_point():
        raise ValueError(f"scores must be a vector of floats, not {scores.dtype} of shape {tuple(scores.shape)}")
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, not {method!r}")
    if k < 0 or (k > 0 and not scores.numel()):
        raise ValueError(f"{k} rows cannot be drawn from {scores.numel()}")


def _scaled(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The scores as whole numbers in fp64 (see `_UNITS`), all 0 if one is not valid; and whether all are valid."""
    w = scores.detach().double()
    if not w.numel():
        return w, w.new_ones((), dtype=torch.bool)
    sound = ((w >= 0) & (w < torch.inf)).all()
    w = w.where(sound, 0.0)  # the conversion of NaN to an integer is undefined
    largest = w.amax()
    return (w / largest.where(largest > 0, 1.0) * (_UNITS / w.numel())).ceil(), sound


def _cumulated(w: Tensor) -> Tensor:
    """The cumulated sum of whole numbers. In integers, which PyTorch's deterministic mode allows on CUDA."""
    return w.to(torch.int64).cumsum(0).to(w.dtype)


def _by_score(w: Tensor, k: int, method: str, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Rows and weights of the methods that draw by score, k < n."""
    slot = torch.arange(k, device=w.device)
    order, certain, rest = _split(w, k, method)
    cumulated = _cumulated(rest)
    each = cumulated[-1] / (k - certain)
    if method == "systematic":
        u = _random(1, w, generator)
        points = (slot - certain + u) * each
    else:
        u = _random(k, w, generator)
        points = u * cumulated[-1]
    drawn = _rows_under(points, cumulated, rest)
    weights = torch.where(rest > 0, each / rest, 0.0).index_select(0, drawn)
    # `order` begins with the certain rows; where the sum is exact, with all rows of weight 1.
    count = (w > 0).sum()
    exact = count <= k
    taken = exact | (slot < certain)
    return torch.where(taken, order[:k], drawn), torch.where(taken, (slot < count).to(w.dtype), weights)


def _uniform(w: Tensor, k: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Rows and weights of a simple random sample, k < n."""
    keys = _random(w.numel(), w, generator)
    rows = keys.where(w > 0, 2.0).topk(k, largest=False).indices
    weight = ((w > 0).sum() / k).clamp(min=1.0).to(w.dtype)
    return rows, torch.where(w.index_select(0, rows) > 0, weight, 0.0)


def _random(count: int, w: Tensor, generator: torch.Generator | None) -> Tensor:
    """Uniform in [0, 1), (count,), of the dtype and device of `w`."""
    if generator is None:  # the overload with a generator has no graph for dynamic sizes
        return torch.rand(count, dtype=w.dtype, device=w.device)
    return torch.rand(count, dtype=w.dtype, device=w.device, generator=generator)


def _split(w: Tensor, k: int, method: str) -> tuple[Tensor, Tensor, Tensor]:
    """Rows by falling score; how many of them are certain (at most k - 1); the scores, with 0 for certain rows."""
    ordered, order = w.sort(descending=True, stable=True)
    tail = _cumulated(ordered.flip(0)).flip(0)[:k]
    left = torch.arange(k, 0, -1, device=w.device)
    if method == "crs":
        certain = torch.zeros((), dtype=torch.int64, device=w.device)
    elif method == "wta-crs":
        certain = (tail / left).argmin()
    else:
        # A probability that rounding has put just below 1 counts as 1, so that no row is drawn twice.
        slack = 1 - k * 2.0**-50
        certain = (ordered[:k] * left >= tail * slack).to(torch.int32).cumprod(0).sum().clamp(max=k - 1)
    is_certain = torch.arange(w.numel(), device=w.device) < certain
    return order, certain, w.where(~torch.zeros_like(is_certain).scatter(0, order, is_certain), 0.0)


def _rows_under(points: Tensor, cumulated: Tensor, scores: Tensor) -> Tensor:
    """For each point, the row whose interval of the cumulated scores contains it; rounding may put it past the end."""
    last = torch.arange(len(scores), device=scores.device).where(scores > 0, 0).amax()
    return torch.searchsorted(cumulated, points, right=True).clamp(max=last)


def _variance_of_uniform(x: Tensor, dy: Tensor, w: Tensor, k: int) -> float:
    n = len(w)
    spread = float(_squared_norms(x, dy).sum()) - _square(x.t() @ dy) / n
    return n * (n - k) / (k * (n - 1)) * spread


def _variance_with_replacement(x: Tensor, dy: Tensor, w: Tensor, k: int, method: str) -> float:
    _, certain, rest = _split(w, k, method)
    x, dy, rest = x[rest > 0], dy[rest > 0], rest[rest > 0]
    second_moment = float((_squared_norms(x, dy) * rest.sum() / rest).sum())
    return (second_moment - _square(x.t() @ dy)) / (k - int(certain))


def _variance_of_systematic(x: Tensor, dy: Tensor, w: Tensor, k: int) -> float:
    _, certain, rest = _split(w, k, "systematic")
    x, dy, rest = x[rest > 0], dy[rest > 0], rest[rest > 0]
    slots, cumulated = k - int(certain), _cumulated(rest)
    each = cumulated[-1] / slots
    # The drawn rows change where u passes the end of a row's interval.
    ends = (cumulated / each).remainder(1).sort().values
    ends = torch.cat((ends.new_zeros(1), ends, ends.new_ones(1)))
    u, share = (ends[1:] + ends[:-1]) / 2, ends.diff()
    if len(u) > _OFFSETS:
        u = (torch.arange(_OFFSETS, dtype=w.dtype, device=w.device) + 0.5) / _OFFSETS
        share = torch.full_like(u, 1 / _OFFSETS)
    points = (torch.arange(slots, device=w.device) + u[:, None]) * each
    rows = _rows_under(points, cumulated, rest)
    # Weights less 1, the error of each row: (offsets, n).
    off = torch.full((len(u), len(rest)), -1.0, dtype=w.dtype, device=w.device)
    off.scatter_add_(1, rows, (each / rest)[rows])
    total = 0.0
    for part in torch.arange(len(rest), device=w.device).split(_ROWS):
        products = (x[part] @ x.t()) * (dy[part] @ dy.t())
        total += float(share @ ((off[:, part] @ products) * off).sum(1))
    return total


def _squared_norms(x: Tensor, dy: Tensor) -> Tensor:
    """|dy_i^T x_i|^2, (n,)."""
    return x.square().sum(1) * dy.square().sum(1)


def _square(tensor: Tensor) -> float:
    return float(tensor.square().sum())
