"""Modules that return something else than a floating tensor are recognised as nothing, and do not stop a patch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt

ODD: dict[str, Callable[[Tensor], Any]] = {
    "integers": lambda y: y.long(),
    "booleans": lambda y: y > 0,
    "complex numbers": lambda y: torch.complex(y, y),
    "a pair": lambda y: (y, y),
    "a dictionary": lambda y: {"y": y},
    "nothing": lambda y: None,
    "a number": lambda y: 1.5,
    "half precision": lambda y: y.half(),
}


class Odd(nn.Module):
    """Returns what a function makes of its input, or of the output of its only child."""

    def __init__(self, inner: nn.Module | None, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make
        if inner is not None:
            self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.make(self.inner(x) if "inner" in self._modules else x)


class Tokens(nn.Module):
    """Casts ids before it looks them up, as the token embeddings of some libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.emb(x.long())
        return y


class Model(nn.Module):
    def __init__(self, odd: nn.Module) -> None:
        super().__init__()
        self.tokens, self.odd, self.norm = Tokens(), odd, nn.LayerNorm(16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.tokens(x))
        found = self.odd(y)
        seen = isinstance(found, Tensor) and found.shape == y.shape and found.is_floating_point()
        logits: Tensor = self.head(y + found if seen else y)
        return logits


@pytest.mark.parametrize(
    "inner", [None, nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU()], ids=["none", "linear", "norm", "act"]
)
@pytest.mark.parametrize("make", ODD)
def test_a_module_with_an_odd_output_does_not_stop_a_patch(inner: nn.Module | None, make: str) -> None:
    torch.manual_seed(0)
    stock = Model(Odd(copy.deepcopy(inner), ODD[make]))
    x = torch.randint(0, 32, (2, 5))
    patched = memopt.patch(copy.deepcopy(stock), "exact-unfolded", inputs={"x": x})
    for model in (stock, patched):
        model(x).square().sum().backward()
    for one, other in zip(stock.parameters(), patched.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-6)
