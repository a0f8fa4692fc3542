"""The random numbers of `memopt.kernels.base.counter`, bit for bit, inside a Triton kernel."""

from __future__ import annotations

import triton
import triton.language as tl

_GOLDEN = tl.constexpr(0x9E3779B9)


@triton.jit
def uniform(index, seed):  # type: ignore[no-untyped-def]
    """Uniform fp32 numbers in [0, 1), one for each element of `index` (int64).

    `seed` is an argument of the kernel of at most 64 bits; name it in its `do_not_specialize`.
    """
    seed = tl.full((1,), 0, tl.uint64) + seed
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    first = _mix(_sum(_mix(_sum(low, _GOLDEN)), high))
    second = _mix(_sum(first, _GOLDEN))
    mixed = _mix(index.to(tl.uint32) ^ first)
    bits = _mix(_sum(_sum(mixed, _product((index >> 32).to(tl.uint32), _GOLDEN)), second))
    return (bits >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2**-24


@triton.jit
def _mix(word):  # type: ignore[no-untyped-def]
    word = word ^ (word >> 16)
    word = _product(word, 0x7FEB352D)
    word = word ^ (word >> 15)
    word = _product(word, 0x846CA68B)
    return word ^ (word >> 16)


# They wrap around on purpose; Triton's debug mode would report an overflow.
@triton.jit
def _sum(a, b):  # type: ignore[no-untyped-def]
    return tl.add(a, b, sanitize_overflow=False)


@triton.jit
def _product(a, b):  # type: ignore[no-untyped-def]
    return tl.mul(a, b, sanitize_overflow=False)
