"""Every way to misjudge a fold that has been thought of, as a small model with one trap."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memopt.walk.calls.inputs import Call
from memopt.walk.folds.proof import TOLERANCE, fold_error, prove
from memopt.walk.models.build import clone_to_meta
from memopt.walk.observe import find_sites
from memopt.walk.sites import NormSite, Sites
from tests.walk import toys

LEGAL = [toy for toy, obstacle in toys.VERDICTS.items() if obstacle is None]
ILLEGAL = [toy for toy, obstacle in toys.VERDICTS.items() if obstacle is not None]
#: What only numbers can show: meta tensors have no values to branch on or to give to numpy.
NEEDS_NUMBERS = {toys.ReadByNumpy, toys.KeptForNextCall}


def norm_site(sites: Sites) -> NormSite:
    return next(norm for norm in sites.norms if norm.name == "norm")


@pytest.mark.parametrize("toy", LEGAL, ids=lambda toy: toy.__name__)
def test_a_legal_fold_is_found_and_changes_no_output(toy: type[toys.Toy]) -> None:
    model, x = toys.build(toy)
    norm = norm_site(find_sites(model, {"x": x}))
    assert norm.fold_obstacles == ()
    assert fold_error(model, [norm], [Call("x", {"x": x})]) <= TOLERANCE


@pytest.mark.parametrize("toy", ILLEGAL, ids=lambda toy: toy.__name__)
def test_an_illegal_fold_is_refused_with_its_reason(toy: type[toys.Toy]) -> None:
    model, x = toys.build(toy)
    obstacles = norm_site(find_sites(model, {"x": x})).fold_obstacles
    assert any(str(toys.VERDICTS[toy]) in obstacle for obstacle in obstacles), obstacles


@pytest.mark.parametrize("toy", [t for t in toys.VERDICTS if t not in NEEDS_NUMBERS], ids=lambda toy: toy.__name__)
def test_the_verdict_on_meta_is_that_on_numbers(toy: type[toys.Toy]) -> None:
    model, x = toys.build(toy)
    on_numbers = norm_site(find_sites(model, {"x": x}))
    on_meta = norm_site(find_sites(clone_to_meta(model), {"x": x.to("meta")}))
    assert (on_meta.foldable, on_meta.consumers) == (on_numbers.foldable, on_numbers.consumers)


@pytest.mark.parametrize("toy", [toys.Residual, toys.AlsoOnRawInput, toys.InPlaceAdd], ids=lambda toy: toy.__name__)
def test_a_refused_fold_would_have_changed_an_output(toy: type[toys.Toy]) -> None:
    model, x = toys.build(toy)
    norm = norm_site(find_sites(model, {"x": x}))
    assert fold_error(model, [norm], [Call("x", {"x": x})]) > 1e-3


def test_keys_without_a_bias_may_do_without() -> None:
    model, x = toys.build(toys.Keys)
    norm = norm_site(find_sites(model, {"x": x}))
    assert {c.parameter: c.needs_bias for c in norm.consumers if c.bias is None} == {"key.weight": False}
    assert prove(model, [norm], [Call("x", {"x": x})]).proved == ("norm",)


def test_whether_a_bias_may_be_left_out_is_for_the_proof_to_say() -> None:
    model, x = toys.build(toys.BiaslessBesideBias)
    norm = norm_site(find_sites(model, {"x": x}))
    assert norm.fold_obstacles == ()
    assert set(prove(model, [norm], [Call("x", {"x": x})]).refused) == {"norm"}


def test_a_bias_is_not_left_out_of_what_no_output_depends_on() -> None:
    model, x = toys.build(toys.DeadKeys)
    norm = norm_site(find_sites(model, {"x": x}))
    proof = prove(model, [norm], [Call("x", {"x": x})])
    assert (proof.proved, proof.unseen) == ((), ("norm",))


def test_observation_leaves_the_model_as_it_was() -> None:
    model, x = toys.build(toys.DropoutBetween)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    find_sites(model, {"x": x})
    assert not model.training
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_consumer_names_axis_bias_and_channels() -> None:
    model, x = toys.build(toys.FlippedChannels)
    (consumer,) = norm_site(find_sites(model, {"x": x})).consumers
    assert (consumer.parameter, consumer.module, consumer.axis) == ("linear.weight", "linear", 1)
    assert consumer.bias == "linear.bias"
    assert consumer.channels == tuple(reversed(range(toys.WIDTH)))
    assert not consumer.same_storage


def test_coordinates_that_read_something_else_have_no_channel() -> None:
    model, x = toys.build(toys.BesideRawInput)
    (consumer,) = norm_site(find_sites(model, {"x": x})).consumers
    assert consumer.channels == (*range(toys.WIDTH), *[-1] * toys.WIDTH)


def test_a_constant_factor_is_the_consumers_scale() -> None:
    model, x = toys.build(toys.Scaled)
    (consumer,) = norm_site(find_sites(model, {"x": x})).consumers
    assert consumer.scale == 0.5


def test_linears_that_read_the_norms_own_storage_are_recorded() -> None:
    model, x = toys.build(toys.UsedByTwoLinears)
    sites = find_sites(model, {"x": x})
    assert all(consumer.same_storage for consumer in norm_site(sites).consumers)
    shared = {linear.parameter: linear.input_shared_with for linear in sites.linears}
    assert shared == {"linear.weight": ("other.weight",), "other.weight": ("linear.weight",)}


def test_a_model_of_several_text_models_is_as_wide_as_its_norms() -> None:
    class Ambiguous:
        def get_text_config(self) -> None:
            raise ValueError("multiple valid text configs")

    model, x = toys.build(toys.Residual)
    model.config = Ambiguous()  # type: ignore[assignment]
    assert find_sites(model, {"x": x}).hidden_size == toys.WIDTH


class ChangesInput(nn.Module):
    """Adds to the input of its first norm in place, to that of its second one not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.linear = nn.RMSNorm(8), nn.RMSNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        y = self.first(x).tanh()
        x += y
        return x + self.linear(self.second(x).tanh())


def test_a_norm_whose_input_is_changed_in_place_after_it_is_recorded() -> None:
    sites = find_sites(ChangesInput(), {"x": torch.randn(2, 3, 8)})
    assert {norm.name: norm.input_changes for norm in sites.norms} == {"first": True, "second": False}
    assert not any(norm.output_changes for norm in sites.norms)
    assert sites.overwritten == ("first",)
