"""Random numbers that depend only on an element's index and a seed.

So equal seeds give equal runs, whatever the order of launches and the sizes of tiles.
:mod:`memopt.kernels.base.counter_triton` gives equal bits inside a kernel. Not for cryptography.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from memopt.torch_compat import no_dispatch

_WORD = 0xFFFFFFFF
#: 2**32 divided by the golden ratio: keeps index and seed 0 away from 0, which `_mix` maps to itself.
_GOLDEN = 0x9E3779B9

Word = TypeVar("Word", int, Tensor)


def uniform(index: Tensor, seed: int) -> Tensor:
    """Uniform numbers in [0, 1), one for each element of `index`.

    Args:
        index: int64, any shape; all 64 bits count.
        seed: any integer; counts modulo 2**64.

    Returns:
        fp32 multiples of 2**-24 with the shape of `index`.
    """
    first, second = _keys(seed)
    low, high = index & _WORD, (index >> 32) & _WORD
    # The high word is added between two rounds: before the first it would only shift the low word.
    bits = _mix((_mix(low ^ first) + high * _GOLDEN + second) & _WORD)
    return (bits >> 8).to(torch.float32) * 2.0**-24


def draw_seed() -> int:
    """A seed from torch's default CPU generator, which ``torch.manual_seed`` reproduces: no device is waited for."""
    with no_dispatch():  # a real number under fake tensors too
        return int(torch.randint(2**31 - 1, (), device="cpu"))


def _keys(seed: int) -> tuple[int, int]:
    low, high = seed & _WORD, (seed >> 32) & _WORD
    first = _mix((_mix((low + _GOLDEN) & _WORD) + high) & _WORD)
    return first, _mix((first + _GOLDEN) & _WORD)


def _mix(word: Word) -> Word:
    """A permutation of 32 bits in which every bit of `word` changes half of the result: Chris Wellons' lowbias32
    (https://nullprogram.com/blog/2018/07/31/). Products that overflow int64 keep their low 32 bits."""
    word = word ^ (word >> 16)
    word = (word * 0x7FEB352D) & _WORD
    word = word ^ (word >> 15)
    word = (word * 0x846CA68B) & _WORD
    return word ^ (word >> 16)
