"""The states that memopt predicts for torchao's optimizers are those that torchao makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memopt.prediction.optimizers import follow
from memopt.prediction.setup import Setup

optim = pytest.importorskip("torchao.optim")
SHAPES = ((512, 256), (4095,), (4100,), (8192,))


@pytest.mark.parametrize(
    ("optimizer", "made"), [("adamw8bit-torchao", optim.AdamW8bit), ("adamw4bit-torchao", optim.AdamW4bit)]
)
def test_states_have_the_bytes_of_torchaos(optimizer: Any, made: Any) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in SHAPES]
    real = made(parameters, block_size=256)  # as Trainer makes it
    states = [real._new_buffer(each, signed) for each in parameters for signed in (True, False)]
    parts = [getattr(each, name) for each in states for name in getattr(each, "tensor_attrs", ())]
    parts += [each for each in states if not hasattr(each, "tensor_attrs")]
    forms = tuple((shape, torch.bfloat16) for shape in SHAPES)
    assert sum(each.nbytes for each in follow(forms, Setup(optimizer)).states) == sum(each.nbytes for each in parts)
