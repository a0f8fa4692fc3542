"""Parts that a model's own forward does not reach are called on their own, and only those."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from memopt.walk.calls.inputs import Call, runnable_calls
from memopt.walk.calls.parts import every_call
from memopt.walk.folds.proof import TOLERANCE, fold_error, prove
from memopt.walk.observe import find_sites
from memopt.walk.sites import NormSite, Sites


class _Config(PreTrainedConfig):
    model_type = "toy_of_parts"

    def __init__(self, **settings: Any) -> None:
        super().__init__(vocab_size=50, hidden_size=8, image_size=8, patch_size=4, num_channels=3, **settings)


class _Base(PreTrainedModel):
    config_class = _Config


class Tower(_Base):
    """Reads images; its last norm is what it returns."""

    main_input_name = "pixel_values"

    def __init__(self, config: _Config) -> None:
        super().__init__(config)
        self.stem = nn.Conv2d(3, 8, 4, 4)
        self.norm = nn.LayerNorm(8)
        self.act = nn.SiLU()
        self.gate, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.last = nn.LayerNorm(8)

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        x = self.stem(pixel_values).flatten(2).transpose(1, 2)
        y = self.norm(x)
        return {"last_hidden_state": self.last(x + self.down(self.act(self.gate(y)) * self.up(y)))}


class Text(_Base):
    """A text model beside a tower that text alone does not reach."""

    def __init__(self, config: _Config) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(50, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 50)
        self.tower = Tower(config)

    def forward(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Tensor]:
        return {"logits": self.head(self.norm(self.embed(input_ids)))}


class WithFeatures(Text):
    """The same with a method that reaches the tower, and one that reaches nothing new."""

    def __init__(self, config: _Config) -> None:
        super().__init__(config)
        self.project = nn.Linear(8, 8)

    def get_image_features(self, pixel_values: Tensor) -> Tensor:
        features: Tensor = self.project(self.tower(pixel_values=pixel_values)["last_hidden_state"])
        return features

    def get_text_features(self, input_ids: Tensor) -> Tensor:
        features: Tensor = self.norm(self.embed(input_ids))
        return features


class NeedsKey(Tower):
    def forward(self, pixel_values: Tensor, key: object) -> dict[str, Tensor]:  # type: ignore[override]
        return super().forward(pixel_values)


class Unreachable(Text):
    def __init__(self, config: _Config) -> None:
        super().__init__(config)
        self.tower = NeedsKey(config)


def build(cls: type[PreTrainedModel]) -> PreTrainedModel:
    torch.manual_seed(0)
    model = cls(_Config()).double().eval()
    for parameter in model.parameters():
        parameter.data = parameter.data + 0.3 * torch.randn_like(parameter)
    return model


def site(sites: Sites, name: str) -> NormSite:
    return next(norm for norm in sites.norms if norm.name == name)


def test_a_tower_that_the_forward_does_not_reach_is_called() -> None:
    calls = every_call(build(Text))
    assert [call.label for call in calls][-1].startswith("tower: ")
    assert {call.target for call in calls} == {"", "tower"}


def test_a_method_that_reaches_it_comes_first_and_alone() -> None:
    calls = every_call(build(WithFeatures))
    assert {call.target for call in calls} == {"", "get_image_features"}


def test_nothing_is_tried_where_everything_ran() -> None:
    seen: list[str] = []

    def run(model: nn.Module, call: Call) -> Any:
        seen.append(call.label)
        return call.run(model)

    model = build(Tower)
    assert [call.label for call in every_call(model, run=run)] == [call.label for call in runnable_calls(model)]
    assert all(":" not in label for label in seen)


def test_inputs_of_the_user_are_the_only_call() -> None:
    calls = every_call(build(Text), {"input_ids": torch.ones(1, 3, dtype=torch.long)})
    assert [call.label for call in calls] == ["inputs"]


def test_a_part_that_does_not_run_is_reported_with_one_error() -> None:
    calls = every_call(build(Unreachable))
    (error,) = [text for label, text in calls.errors if label.startswith("tower")]
    assert "key" in error
    assert {call.target for call in calls} == {""}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_norms_and_gated_mlps_of_a_part_are_found(device: str) -> None:
    sites = find_sites(build(Text).to(device))
    assert site(sites, "tower.norm").foldable
    assert {c.parameter for c in site(sites, "tower.norm").consumers} == {"tower.gate.weight", "tower.up.weight"}
    (mlp,) = sites.gated_mlps
    assert (mlp.name, mlp.down) == ("tower", "tower.down.weight")
    assert sites.loss_head is not None
    assert sites.loss_head.parameter == "head.weight"
    assert any("tower" in note and "called on their own" in note for note in sites.notes)
    assert ("tower: plain", "ok") in sites.traces


def test_what_a_part_returns_may_not_change() -> None:
    last = site(find_sites(build(Text)), "tower.last")
    assert "its output is returned as last_hidden_state by tower" in last.fold_obstacles
    assert not last.foldable_with_cautions


def test_what_a_part_returns_to_a_method_that_projects_it_is_a_caution() -> None:
    last = site(find_sites(build(WithFeatures)), "tower.last")
    assert last.foldable_with_cautions
    assert last.cautions == ("its output is returned as last_hidden_state by tower",)
    assert last.changed_outputs == ()


def test_a_method_that_reaches_nothing_new_leaves_no_trace() -> None:
    norm = site(find_sites(build(WithFeatures)), "norm")
    assert norm.fold_obstacles == ()


def test_folds_of_a_part_are_proved_by_its_calls() -> None:
    model = build(WithFeatures)
    calls = every_call(model)
    sites = find_sites(model)
    assert prove(model, [site(sites, "tower.norm")], calls).proved == ("tower.norm",)
    main = [call for call in calls if not call.target]
    assert prove(model, [site(sites, "tower.norm")], main).unseen == ("tower.norm",)
    assert fold_error(model, [site(sites, "tower.last")], calls) <= TOLERANCE
