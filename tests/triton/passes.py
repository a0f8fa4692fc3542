"""How many passes a backward takes by the kernels."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from memopt.kernels.base import saved_inputs


def assert_the_first_of_two_takes_one_more(
    gradients: Callable[[], tuple[Tensor, ...]],
    kernels: ModuleType,
    recompute: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two layers that are alike, the first in backward recomputes its output in a pass of its own, to the same bits.

    Args:
        gradients: of a loss behind both layers.
        kernels: of the layers' operator.
        recompute: which argument of ``kernels.launch_backward`` says whether the same pass recomputes the output.
    """
    one_passes: list[bool] = []
    launch_backward = kernels.launch_backward

    def noted(*args: Any) -> Any:
        one_passes.append(args[recompute])
        return launch_backward(*args)

    monkeypatch.setattr(kernels, "launch_backward", noted)
    found = gradients()
    assert one_passes == [False, True]
    monkeypatch.setattr(saved_inputs, "is_largest_yet", lambda tensor: False)
    assert all(map(torch.equal, found, gradients()))
    assert one_passes == [False, True, True, True]
