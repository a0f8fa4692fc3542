"""The arithmetic of a fold: y = (offset + gamma) * x_hat + beta feeding W, b becomes W' = W diag(offset + gamma),
b' = b + W beta.

Products are taken in fp64 and every stored element is rounded once. Products of 16- and 32-bit numbers are
exact in fp64; sums are carried as unevaluated pairs (hi, lo) of fp64 numbers, which makes the result the
correctly rounded one whatever the order and the block size. torch converts fp64 to 16 bits through fp32,
which rounds twice; :func:`round_once` avoids that by rounding to odd on the way (Boldo and Melquiond,
"Emulation of FMA and correctly rounded sums", IEEE TC 57(4), 2008).

Which tensors are folded is decided in `fold`; files are read and written by `writer`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from memopt.checkpoint.tiles import tiles, view3

Channels = tuple[int, ...] | None
Pair = tuple[torch.Tensor, torch.Tensor]
#: Elements per step: small enough for the cache and for torch to stay in the calling thread.
_TILE = 32767


def fold_scale(gamma: torch.Tensor, offset: int, size: int, channels: Channels = None) -> torch.Tensor:
    """fp64 scale of each of `size` coordinates; 1 where `channels` is negative (not this norm's)."""
    return _spread(gamma.double().reshape(-1) + offset, size, channels, neutral=1.0)


def fold_weight(
    weight: torch.Tensor, gamma: torch.Tensor, offset: int = 0, axis: int = -1, channels: Channels = None
) -> torch.Tensor:
    """W diag(offset + gamma): `weight` with its coordinates along `axis` scaled, each element rounded once."""
    axis %= weight.dim()
    scale = fold_scale(gamma, offset, weight.shape[axis], channels)
    return scale_tile(weight.reshape(view3(weight.shape, axis)), scale).reshape(weight.shape)


def fold_bias(
    bias: torch.Tensor,
    weight: torch.Tensor,
    beta: torch.Tensor,
    axis: int = -1,
    channels: Channels = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """b + scale * W beta, correctly rounded to the dtype of `bias`.

    Args:
        bias: shape of `weight` without `axis`, or a prefix of it (kernel dimensions are summed).
        weight: the weight before its own fold.
        beta: the norm's bias, one value a channel.
        axis: axis of `weight` that is contracted.
        channels: norm channel of each coordinate along `axis`; negative where it is not this norm's.
        scale: constant between the norm and the contraction.
    """
    axis %= weight.dim()
    shift = fold_shift(beta, weight.shape[axis], channels, scale)
    pair = contract_tile(weight.reshape(view3(weight.shape, axis)), shift)
    return finish_bias(bias, per_output(pair, bias.numel()))


def fold_shift(beta: torch.Tensor, size: int, channels: Channels, scale: float) -> torch.Tensor:
    """fp64 constant that each of `size` coordinates adds; 0 where `channels` is negative."""
    return _spread(beta.double().reshape(-1) * scale, size, channels, neutral=0.0)


def scale_tile(block: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`block` (outer, size, inner) times `scale` (size), in the dtype of `block`."""
    result = torch.empty_like(block, memory_format=torch.contiguous_format)
    factors = scale.reshape(1, -1, 1)
    for piece in tiles(_shape3(block), _TILE):
        result[piece] = round_once(block[piece].double() * factors[:, piece[1]], block.dtype)
    return result


def contract_tile(block: torch.Tensor, shift: torch.Tensor) -> Pair:
    """Sum over the middle dimension of `block` (outer, size, inner) times `shift` (size), as a pair (outer, inner)."""
    outer, _, inner = _shape3(block)
    total = zero_pair(outer, inner)
    factors = shift.reshape(1, -1, 1)
    for piece in tiles(_shape3(block), _TILE):
        terms = block[piece].double() * factors[:, piece[1]]
        accumulate(total, piece, sum_pair((terms, torch.zeros_like(terms)), dim=1))
    return total


def zero_pair(*shape: int) -> Pair:
    return torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)


def accumulate(total: Pair, piece: tuple[slice, slice, slice], part: Pair) -> None:
    """Add `part`, the sum of one tile, to the pair `total` (outer, inner) in place."""
    where = (piece[0], piece[2])
    high, low = add_pairs((total[0][where], total[1][where]), part)
    total[0][where], total[1][where] = high, low


def per_output(product: Pair, count: int) -> Pair:
    """A contraction (outer, inner) as `count` sums: kernel dimensions behind the bias's own are summed."""
    return sum_pair((product[0].reshape(count, -1), product[1].reshape(count, -1)), dim=1)


def finish_bias(bias: torch.Tensor, product: Pair) -> torch.Tensor:
    """`bias` plus the flat pair `product`, rounded once."""
    flat = bias.reshape(-1).double()
    high, low = add_pairs(product, (flat, torch.zeros_like(flat)))
    if bias.dtype != torch.float64:
        high = _to_odd(high, low)
    return round_once(high, bias.dtype).reshape(bias.shape)


def round_once(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp64 `values` in `dtype`, rounded to nearest even as from infinite precision."""
    if dtype in (torch.float64, torch.float32):
        return values.to(dtype)
    single = values.float()
    back = single.double()
    if not torch.equal(back, values):
        bits = single.view(torch.int32)
        bits = bits - (back.abs() > values.abs()).int()  # sign and magnitude: one less is one towards zero
        single = (bits | (back != values).int()).view(torch.float32)
    return single.to(dtype)


def add_pairs(a: Pair, b: Pair) -> Pair:
    """Sum of two unevaluated pairs (Knuth's two-sum, then renormalised)."""
    high = a[0] + b[0]
    image = high - a[0]
    low = (a[0] - (high - image)) + (b[0] - image) + (a[1] + b[1])
    total = high + low
    return total, low - (total - high)


def sum_pair(pair: Pair, dim: int) -> Pair:
    """Sum of pairs over `dim`, in a tree."""
    high, low = pair[0].movedim(dim, 0), pair[1].movedim(dim, 0)
    while (count := high.shape[0]) > 1:
        half = count // 2
        total = add_pairs((high[:half], low[:half]), (high[half : 2 * half], low[half : 2 * half]))
        odd = slice(2 * half, count)
        high, low = torch.cat([total[0], high[odd]]), torch.cat([total[1], low[odd]])
    return high[0], low[0]


@dataclass
class RangeChanges:
    """How many elements of folded tensors left the normal range of their dtype."""

    infinities: int = 0
    zeros: int = 0
    subnormals: int = 0

    def count(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """Add what changed from `before` to `after`."""
        info = torch.finfo(after.dtype)
        size = after.abs()
        if bool((size.amin() >= info.tiny) & (size.amax() <= info.max)):
            return
        origin = before.abs()
        self.infinities += int(((size <= info.max).logical_not() & (origin <= info.max)).sum())
        self.zeros += int(((size == 0) & (origin != 0)).sum())
        self.subnormals += int(((size != 0) & (size < info.tiny) & (origin >= info.tiny)).sum())


def _spread(values: torch.Tensor, size: int, channels: Channels, *, neutral: float) -> torch.Tensor:
    """`values` of the norm's channels at the `size` coordinates that read them; `neutral` at the others."""
    if channels is None:
        return values
    spread = torch.full((size,), neutral, dtype=torch.float64)
    index = torch.tensor(channels)
    spread[index >= 0] = values[index[index >= 0]]
    return spread


def _to_odd(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The pair as one fp64 number that no later rounding mistakes for a tie."""
    inexact = (low != 0) & high.isfinite()
    bits = high.view(torch.int64)
    bits = bits - (inexact & (low.sign() != high.sign())).long()
    return torch.where(inexact, bits | 1, bits).view(torch.float64)


def _shape3(block: torch.Tensor) -> tuple[int, int, int]:
    outer, size, inner = block.shape
    return outer, size, inner
