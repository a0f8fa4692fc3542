"""A model on fake tensors, which have shapes and no data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from memopt.torch_compat import FakeTensorMode
from memopt.walk.models.instantiate import numbers_in


def make_fake(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replace every tensor of `model` but `numbers_in` by a fake one on the CPU; tied tensors stay tied."""
    numbers = {id(number) for number in numbers_in(model).values()}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) in numbers:
            return tensor
        with mode:
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")

    replace_tensors(model, fake)


def replace_tensors(model: nn.Module, replacement: Callable[[Tensor], Tensor]) -> None:
    """Put `replacement` of each in the place of the parameters, buffers and other tensors of all modules of `model`.

    Parameters stay parameters; tied tensors stay tied.
    """
    made: dict[int, tuple[Tensor, Tensor]] = {}

    def of(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            twin = replacement(tensor)
            if isinstance(tensor, nn.Parameter):
                twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
            # The reference to the original keeps its id from being used again.
            made[id(tensor)] = (tensor, twin)
        return made[id(tensor)][1]

    for module in model.modules():
        tables: list[dict[str, Any]] = [module._parameters, module._buffers, vars(module)]
        for table in tables:
            for name, value in list(table.items()):
                if isinstance(value, Tensor):
                    table[name] = of(value)
