"""A step of every model in every way to train it: gradients as right as stock's, no more synchronisations."""

from __future__ import annotations

import copy

import pytest
import torch

from memopt.verification.gradient import compare_gradients
from memopt.walk.aten.precision import precise
from tests.device.emulator.install import counting
from tests.device.scenarios import Way, batch, built, every_way, pairwise, patched, step
from tests.support.compare import gradients_of

#: Every two words together; the others are slow.
FEW = pairwise(list(every_way()))


def parameters() -> list[object]:
    few = set(FEW)
    return [pytest.param(w, id=str(w), marks=[] if w in few else [pytest.mark.slow]) for w in every_way()]


@pytest.mark.parametrize("way", parameters())
@pytest.mark.rotates(3)
def test_a_step_is_as_right_as_stock_and_waits_no_more_for_the_device(way: Way) -> None:
    model, inputs = built(way), batch(way)
    truth = truth_of(way, model, inputs)

    def measured() -> tuple[float, dict[str, torch.Tensor], int]:
        for _ in range(2):  # the first step fills caches
            model.zero_grad()
            with counting() as count:
                loss = step(way, model, inputs)
        return loss.item(), gradients_of(model), count.waits

    stock_loss, stock, stock_waits = measured()
    patched(way, model)
    loss, found, waits = measured()
    assert found.keys() == stock.keys()
    checks = list(compare_gradients([found], [stock], truth, way.computed_in, "fp64", stock_loss, loss))
    assert all(check.status == "pass" for check in checks), checks
    assert waits.total() <= stock_waits.total(), f"{waits}; stock: {stock_waits}"


def truth_of(way: Way, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients of the stock model in fp64."""
    exact = copy.deepcopy(model).double()
    if way.model == "mixtral":  # grouped products have no fp64
        getattr(exact, "base_model", exact).set_experts_implementation("eager")
    wide = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}
    with precise(torch.float64):
        exact(**wide).loss.backward()
    return gradients_of(exact)


def test_the_chosen_ways_are_few_and_every_two_words_meet() -> None:
    assert len(FEW) <= 60
    assert {(way.model, way.precision) for way in FEW} == {(way.model, way.precision) for way in every_way()}
    assert {(way.model, way.checkpointing) for way in FEW} == {(w.model, w.checkpointing) for w in every_way()}
