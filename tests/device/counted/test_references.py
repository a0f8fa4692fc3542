"""The references of the operators on a device, as for fp64 and with ``MEMOPT_TRITON=0``: they do not wait for it."""

from __future__ import annotations

import pytest

import memopt
from memopt.kernels.base import device
from tests.device.counted.test_default_device import batch, waits_of_a_step
from tests.factories import tiny_model


@pytest.mark.parametrize("recipe", ["exact-levels", "approx-2bit", "int8", "sampled"])
@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.rotates(3)
def test_a_step_without_kernels_waits_no_more_than_stock(
    name: str, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_is_there", lambda tensor: False)
    model = tiny_model(name).cuda()
    stock = waits_of_a_step(model, batch(name))
    memopt.patch(model, recipe)
    assert waits_of_a_step(model, batch(name)) <= stock
