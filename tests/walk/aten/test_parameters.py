"""A view or a followed copy of a parameter is recognised, with the axis that each dimension walks."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from memopt.walk.aten.parameters import SINGLE, Along, ParameterTable


@pytest.fixture(params=["cpu", "meta"])
def linear(request: pytest.FixtureRequest) -> nn.Linear:
    return nn.Linear(6, 4, device=request.param)


def axes(table: ParameterTable, tensor: Tensor) -> list[object]:
    view = table.view(tensor)
    assert view is not None
    return [(d.axis, d.start, d.step) if isinstance(d, Along) else d for d in view.dims]


def test_a_transpose_swaps_the_axes(linear: nn.Linear) -> None:
    assert axes(ParameterTable(linear), linear.weight.t()) == [(1, 0, 1), (0, 0, 1)]


def test_slices_start_where_they_start(linear: nn.Linear) -> None:
    assert axes(ParameterTable(linear), linear.weight[1::2, 2:]) == [(0, 1, 2), (1, 2, 1)]


def test_merged_and_broadcast_dimensions_are_not_understood(linear: nn.Linear) -> None:
    table = ParameterTable(linear)
    assert axes(table, linear.weight.flatten()) == [None]
    assert axes(table, linear.weight[None].expand(3, 4, 6)) == [None, (0, 0, 1), (1, 0, 1)]
    assert axes(table, linear.weight[None]) == [SINGLE, (0, 0, 1), (1, 0, 1)]


def test_other_tensors_are_no_parameters(linear: nn.Linear) -> None:
    assert ParameterTable(linear).view(linear.weight * 2) is None


def test_a_cast_copy_is_followed_and_a_rounded_one_is_another_use(linear: nn.Linear) -> None:
    table = ParameterTable(linear)
    half, rounded = linear.weight.half(), linear.weight.round()
    assert table.follow("_to_copy", (linear.weight,), linear.weight, [half])
    assert axes(table, half) == [(0, 0, 1), (1, 0, 1)]
    turned = half.t()
    assert table.follow("t", (half,), half, [turned])
    assert axes(table, turned) == [(1, 0, 1), (0, 0, 1)]
    assert not table.follow("round", (linear.weight,), linear.weight, [rounded])


def test_two_parameters_on_one_storage_are_marked(linear: nn.Linear) -> None:
    linear.part = nn.Parameter(linear.weight.detach()[:2])
    assert ParameterTable(linear).overlapping == {id(linear.weight), id(linear.part)}


def test_a_tied_parameter_has_its_name_in_the_module_that_reads_it() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    table = ParameterTable(model)
    assert table.name(model["a"].weight, "b") == "b.weight"
    assert table.name(model["a"].weight, "elsewhere") == "a.weight"
