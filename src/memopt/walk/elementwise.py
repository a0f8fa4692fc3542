"""Is a module an elementwise nonlinearity, and which one? Answered by running a copy of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from memopt.kernels.formulas import ACTIVATIONS
from memopt.walk.isolate import Isolated, isolate, signature
from memopt.walk.precision import Float64Mode

_AGREES = 1e-7

#: Ops that only look at a tensor in another way, or in another dtype: nothing of theirs is an intermediate.
_VIEWS_AND_CASTS = {
    "_to_copy", "_unsafe_view", "alias", "clone", "detach", "expand", "lift_fresh", "permute", "reshape", "select",
    "slice", "squeeze", "t", "transpose", "unsqueeze", "view",
}  # fmt: skip


@dataclass(frozen=True)
class ActivationProbe:
    kind: str
    """A key of `memopt.kernels.formulas.ACTIVATIONS`, or ``other``."""
    operations: int
    """Aten ops that its forward runs, views and casts not counted."""
    replays: bool
    """Running it again gives the same values, in train mode too, and leaves its input alone."""


def probe_activation(module: nn.Module, cache: dict[Any, Any] | None = None) -> ActivationProbe | None:
    """The nonlinearity that `module` computes; None when it has parameters or children or is not elementwise."""
    if next(module.parameters(), None) is not None or next(module.children(), None) is not None:
        return None
    if any(buffer.is_meta for buffer in module.buffers()):
        return None  # a buffer without values may be part of the formula
    if cache is None:
        return _probe(module)
    key = ("activation", signature(module))
    if key not in cache:
        cache[key] = _probe(module)
    result: ActivationProbe | None = cache[key]
    return result


def _probe(module: nn.Module) -> ActivationProbe | None:
    copy = isolate(module)
    if copy is None:
        return None
    x = torch.linspace(-12, 12, 240, dtype=torch.float64).reshape(2, 3, 40)
    if copy.tries(x) != x.shape:
        return None
    y = copy.run(x)
    order = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(1))
    shuffled = copy.run(x.flatten()[order].reshape(x.shape))
    if not y.isfinite().all() or not torch.allclose(shuffled.flatten(), y.flatten()[order], atol=1e-12):
        return None
    if _is_affine(x.flatten(), y.flatten()):
        return None  # identity, a scale, a dropout that is off
    kind = next((k for k, f in ACTIVATIONS.items() if float((f(x) - y).abs().max()) < _AGREES), "other")
    return ActivationProbe(kind, _count_operations(copy, x), _replays(copy, x, y))


def _replays(copy: Isolated, x: Tensor, y: Tensor) -> bool:
    """Whether a second forward in backward would compute what the first one did. Leaves `copy` in train mode."""
    copy.module.train()
    with torch.random.fork_rng(devices=[]), torch.no_grad(), Float64Mode(), _RandomMode() as mode:
        given = x.clone()
        outputs = [copy.module.forward(given) for _ in range(2)]
    unchanged = torch.equal(given, x) and all(torch.equal(output, y) for output in outputs)
    return unchanged and not mode.random


def _is_affine(x: Tensor, y: Tensor) -> bool:
    slope = ((x - x.mean()) * (y - y.mean())).mean() / x.var(unbiased=False)
    return bool((y - y.mean() - slope * (x - x.mean())).abs().max() < 1e-9)


class _RandomMode(TorchDispatchMode):
    """Remembers whether any op drew random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.random = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


class _CountMode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func._schema.name.split("::")[-1] not in _VIEWS_AND_CASTS
        return func(*args, **(kwargs or {}))


def _count_operations(copy: Isolated, x: Tensor) -> int:
    x = x.float()  # in double a cast to fp32 and back would show as work
    with torch.no_grad(), _CountMode() as mode:
        copy.module.forward(x)
    return int(mode.count)
