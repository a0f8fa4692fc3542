"""The proof accepts right folds, finds the wrong ones among them, and leaves the model as it was."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from memopt.walk.calls.inputs import Call
from memopt.walk.folds.proof import TOLERANCE, fold_bias, fold_weight, prove
from memopt.walk.observe import find_sites
from memopt.walk.sites import Consumer, NormSite


class TwoBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.left = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.right = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.dead = nn.LayerNorm(8)
        self.unused = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.unused(self.dead(x))
        for norm, left, right in zip(self.norms, self.left, self.right, strict=True):
            y = norm(x)
            x = x + torch.tanh(left(y)) * right(y)
        return x


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    built = TwoBlocks().double().eval()
    for parameter in built.parameters():
        if parameter.dim() == 1:
            parameter.data = torch.rand_like(parameter) + 0.5
    return built


@pytest.fixture
def calls() -> list[Call]:
    torch.manual_seed(1)
    return [Call("x", {"x": torch.randn(2, 5, 8, dtype=torch.float64)})]


def norm_sites(model: nn.Module, calls: list[Call]) -> dict[str, NormSite]:
    return {norm.name: norm for norm in find_sites(model, calls[0].kwargs).norms}


def test_right_folds_are_proved(model: nn.Module, calls: list[Call]) -> None:
    sites = norm_sites(model, calls)
    proof = prove(model, [sites["norms.0"], sites["norms.1"]], calls)
    assert proof.proved == ("norms.0", "norms.1")
    assert proof.error <= TOLERANCE
    assert proof.refused == {}


@pytest.mark.parametrize(
    "mutate",
    [
        lambda norm: dataclasses.replace(norm, consumers=norm.consumers[:1]),
        lambda norm: dataclasses.replace(norm, offset=1),
        lambda norm: dataclasses.replace(norm, consumers=[dataclasses.replace(c, axis=0) for c in norm.consumers]),
        lambda norm: dataclasses.replace(norm, consumers=[dataclasses.replace(c, bias=None) for c in norm.consumers]),
        lambda norm: dataclasses.replace(norm, consumers=[dataclasses.replace(c, scale=2.0) for c in norm.consumers]),
        lambda norm: dataclasses.replace(
            norm, consumers=[dataclasses.replace(c, channels=(1, 0, 2, 3, 4, 5, 6, 7)) for c in norm.consumers]
        ),
    ],
    ids=["one consumer skipped", "offset", "axis", "bias lost", "scale", "channels swapped"],
)
def test_a_wrong_fold_is_disproved_and_the_right_one_beside_it_kept(
    model: nn.Module, calls: list[Call], mutate
) -> None:  # type: ignore[no-untyped-def]
    sites = norm_sites(model, calls)
    proof = prove(model, [mutate(sites["norms.0"]), sites["norms.1"]], calls)
    assert proof.proved == ("norms.1",)
    assert "changes an output" in proof.refused["norms.0"]


def test_nothing_is_claimed_of_a_norm_that_no_output_depends_on(model: nn.Module, calls: list[Call]) -> None:
    sites = norm_sites(model, calls)
    assert sites["dead"].foldable
    proof = prove(model, [sites["dead"], sites["norms.0"]], calls)
    assert proof.unseen == ("dead",)
    assert proof.proved == ("norms.0",)


def test_a_frozen_norm_is_still_seen(model: nn.Module, calls: list[Call]) -> None:
    model.requires_grad_(False)
    sites = norm_sites(model, calls)
    proof = prove(model, [sites["norms.0"], sites["dead"]], calls)
    assert (proof.proved, proof.unseen) == (("norms.0",), ("dead",))


def test_parameters_are_afterwards_what_they_were(model: nn.Module, calls: list[Call]) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    storages = [parameter.data_ptr() for parameter in model.parameters()]
    prove(model, list(norm_sites(model, calls).values()), calls)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert [parameter.data_ptr() for parameter in model.parameters()] == storages


def test_fold_of_a_transposed_weight_scales_its_rows() -> None:
    weight, gamma = torch.ones(3, 2), torch.tensor([1.0, 2.0, 3.0])
    consumer = Consumer("w", "", axis=0)
    assert fold_weight(weight, gamma, consumer).tolist() == [[1, 1], [2, 2], [3, 3]]
    assert fold_bias(torch.zeros(2), weight, gamma, consumer).tolist() == [6, 6]


def test_fold_of_a_convolution_sums_its_window_into_the_bias() -> None:
    weight, beta = torch.ones(4, 2, 3), torch.tensor([1.0, 10.0])
    assert fold_bias(torch.zeros(4), weight, beta, Consumer("w", "", axis=1)).tolist() == [33.0] * 4


def test_coordinates_without_a_channel_are_left() -> None:
    consumer = Consumer("w", "", axis=1, channels=(1, -1))
    weight, values = torch.ones(1, 2), torch.tensor([5.0, 7.0])
    assert fold_weight(weight, values, consumer).tolist() == [[7, 1]]
    assert fold_bias(torch.zeros(1), weight, values, consumer).tolist() == [7]


class _TwoOutputs(nn.Module):
    """Logits from the last norm, and the norm's output beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.norm(x)
        return {"logits": self.head(y), "hidden_states": y}


def test_an_output_that_a_caution_names_is_not_compared_and_proves_nothing(calls: list[Call]) -> None:
    torch.manual_seed(0)
    model = _TwoOutputs().double().eval()
    model.norm.weight.data = torch.rand_like(model.norm.weight) + 0.5
    site = norm_sites(model, calls)["norm"]
    assert (site.foldable, site.foldable_with_cautions, site.changed_outputs) == (False, True, ("hidden_states",))
    assert set(prove(model, [site], calls).refused) == {"norm"}
    assert prove(model, [site], calls, ignoring=["hidden_states"]).proved == ("norm",)
    assert prove(model, [site], calls, ignoring=["hidden_states", "logits"]).unseen == ("norm",)
