"""What tests of small models with experts share: their tokens, gradients of a step, and how these are compared."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from memopt.walk.aten.precision import precise
from tests.support.compare import step_gradients

IDS = torch.arange(40).reshape(2, 20) * 7 % 61 + 3


def gradients(model: nn.Module, ids: Tensor = IDS) -> dict[str, Tensor]:
    with precise(next(model.parameters()).dtype):
        return step_gradients(model, {"input_ids": ids, "labels": ids})


def assert_same(ours: dict[str, Tensor], stock: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    assert ours.keys() == stock.keys()
    for name, expected in stock.items():
        assert (ours[name].double() - expected).norm() <= tolerance * expected.norm(), name
