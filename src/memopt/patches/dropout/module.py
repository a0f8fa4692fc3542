"""Dropout modules that save a seed instead of their mask.

A module qualifies by its computation, not by its class: it drops each element independently and divides the others by
1 - p, where p is an attribute of the module. Modules that drop channels, paths or steps, that work in place, or that
use one mask in all calls, do not qualify.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memopt.environment.generators import seed_cpu
from memopt.kernels.base.counter import draw_seed
from memopt.kernels.dropout.function import seeded_dropout
from memopt.patches.reads import observed_reads
from memopt.patches.swap import steps_aside, swap_forward
from memopt.torch_compat import PLAIN_TYPES
from memopt.walk.probes.isolate import with_stand_ins

OFF_WHERE_COMPILED = "dropouts keep masks; seeds need eager mode"
_SHAPES = ((16, 256), (8, 16, 32), (4, 8, 8, 16))
#: Allowed deviation of a share of elements, in standard deviations. Seeds are fixed, so results are repeatable.
_SIGMAS = 6


@dataclass(frozen=True)
class DropoutRewrite:
    """State of a patched dropout."""

    probability: str
    """Name of the attribute that holds p; it is read at every call."""


def patch_dropout(module: nn.Module) -> None:
    """Make `module`, a dropout of single elements, draw its mask from a seed, and save only the seed."""
    probability = _probability_of(module)
    x = torch.ones(2, 3, device="cpu")
    reads = observed_reads(module, lambda alone: alone.forward(x), fresh=(probability,))
    swap_forward(module, _forward, DropoutRewrite(probability), reads)


def _forward(
    stock: Callable[..., Tensor], rewrite: DropoutRewrite, module: nn.Module, *args: Any, **kwargs: Any
) -> Tensor:
    given, p = (*args, *kwargs.values()), getattr(module, rewrite.probability)
    drops = module.training and isinstance(p, (int, float)) and 0 < p <= 1
    if not drops or len(given) != 1 or not may_be_seeded(given[0]):
        return stock(module, *args, **kwargs)
    return seeded_dropout(given[0], float(p), draw_seed())


def may_be_seeded(x: Any) -> bool:
    """Whether a seed may replace a mask of `x` here: `x` is a plain floating-point tensor, in eager mode."""
    if type(x) not in PLAIN_TYPES or x.layout is not torch.strided or x.is_nested or not x.is_floating_point():
        return False
    # The answer must not depend on the grad mode: checkpointing runs a module first without gradients and later with
    # them, from one state of the generator, and both runs must get the same mask.
    with torch.enable_grad():
        if steps_aside(off=OFF_WHERE_COMPILED):
            return False
    # A captured graph would draw one mask for all its replays.
    return not (x.is_cuda and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def _probability_of(module: nn.Module) -> str:
    """Name of the attribute that holds the probability; a ValueError if `module` is no dropout of single elements."""
    if next(module.parameters(), None) is not None or next(module.buffers(), None) is not None:
        raise ValueError("it has tensors of its own, so it is not a plain dropout")
    if next(module.children(), None) is not None:
        raise ValueError("it has children, so it is not a plain dropout")
    numbers = [name for name, value in vars(module).items() if _is_probability(value)]
    if not numbers:
        raise ValueError("no attribute holds the probability of a dropout")
    reasons = {name: _objection(module, name) for name in numbers}
    for name, reason in reasons.items():
        if reason is None:
            return name
    raise ValueError("; ".join(dict.fromkeys(reason for reason in reasons.values() if reason is not None)))


def _is_probability(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1


def _objection(module: nn.Module, name: str) -> str | None:
    """Why `module` is not a dropout of single elements with the probability in its attribute `name`; None if it is."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # channel-wise dropouts warn about the shape
        try:
            for shape in _SHAPES:
                for p in (0.5, 0.25):
                    reason = _objection_to(module, name, p, shape)
                    if reason is not None:
                        return reason
            return _objection_when_off(module, name)
        except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError, IndexError) as error:
            return f"it does not run on every shape: {error}"


def _objection_to(module: nn.Module, name: str, p: float, shape: tuple[int, ...]) -> str | None:
    # Far from 0, so that every 0 in the output is a dropped element.
    leaf = (_draw(shape) + 8).requires_grad_()
    x = leaf * 1  # PyTorch forbids to write into a leaf, and the module may write
    y = _run(module, name, p, x)
    if not isinstance(y, Tensor) or y.shape != shape or y.dtype != x.dtype:
        return "it does not return one tensor like its input"
    if x._version or y is x or y.grad_fn is None:
        return "it writes into its input, or drops nothing"
    kept = y.detach() != 0
    factors = kept.double() / (1 - p)
    if not _same(y, x * factors):
        return "its kept elements are not divided by 1 - p, or its dropped elements are not 0"
    if not _are_apart(kept, p):
        return "it does not drop each element on its own with the probability on it"
    (dx,) = torch.autograd.grad(y, leaf, x.detach())
    if not _same(dx, x * factors):
        return "its gradient is not that of a dropout"
    special = x.detach().clone()
    special[..., ::2] = math.inf
    if not _same(_run(module, name, p, special), special * factors):
        return "its mask depends on its input, or on something other than PyTorch's generator"
    if not _is_share(_run(module, name, p, x.detach(), seed=3).ne(0) == kept, p * p + (1 - p) ** 2):
        return "its mask is the same at every call"
    low = x.detach().bfloat16()
    y = _run(module, name, p, low)
    # Two roundings: of 1 / (1 - p) and of the product.
    if y.dtype != low.dtype or not _same(y, low * (y != 0) / (1 - p), rtol=2 * torch.finfo(low.dtype).eps):
        return "it does something else in another dtype"
    return None


def _objection_when_off(module: nn.Module, name: str) -> str | None:
    x = _draw(_SHAPES[0])
    for p, training in ((0.5, False), (0.0, True)):
        y = _run(module, name, p, x, training=training)
        if not torch.equal(y, x):
            return "it changes its input although it is off"
    return None


def _draw(shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(1)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")


def _run(module: nn.Module, name: str, p: float, x: Tensor, *, seed: int = 2, training: bool = True) -> Tensor:
    alone = with_stand_ins(module, training=training)
    alone.__dict__[name] = p
    seed_cpu(seed)
    y: Tensor = alone.forward(x)
    return y


def _are_apart(kept: Tensor, p: float) -> bool:
    """Whether the share of kept elements, and of equal neighbours along each dimension, fits independent draws."""
    apart = _is_share(kept, 1 - p)
    for dim in range(kept.dim()):
        one, other = kept.narrow(dim, 1, kept.size(dim) - 1), kept.narrow(dim, 0, kept.size(dim) - 1)
        apart &= _is_share(one == other, p * p + (1 - p) ** 2)
    return apart


def _is_share(flags: Tensor, expected: float) -> bool:
    # Pairs of neighbours overlap, so the variance of their share may be twice the variance for independent draws.
    deviation = math.sqrt(2 * expected * (1 - expected) / flags.numel())
    return abs(float(flags.double().mean()) - expected) < _SIGMAS * deviation


def _same(a: Tensor, b: Tensor, rtol: float = 1e-12) -> bool:
    return torch.allclose(a, b, rtol=rtol, atol=0, equal_nan=True)
