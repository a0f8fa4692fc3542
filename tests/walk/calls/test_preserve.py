"""A model is left as it was, whatever a forward did to it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from memopt.walk.calls.preserve import preserved


class Caching(nn.Module):
    """Keeps a table for the last length it has seen, and how long that was."""

    length = 0

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None
        self.other: Tensor | None = torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or len(x) != self.length:
            self.length, self.table = len(x), torch.arange(float(len(x)))
        self.other = self.table
        return x + self.table


def test_a_cache_and_what_tells_its_size_go_back_together() -> None:
    model = Caching()
    with preserved(model):
        model(torch.zeros(3))
    assert model.table is None
    assert model.other is not None
    assert len(model.other) == 2
    model(torch.zeros(4))
    with preserved(model):
        model(torch.zeros(3))
    assert model.table is not None
    assert (model.length, len(model.table)) == (4, 4)
    assert len(model(torch.zeros(4))) == 4
