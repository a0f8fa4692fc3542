"""Convolutions that read a recomputed activation let go of it before its gradient is computed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import HubertConfig, HubertModel

import memopt
from memopt.patches.convolution import module as convolutions


def hubert() -> nn.Module:
    config = HubertConfig(
        conv_dim=(16, 16, 16), conv_stride=(2, 2, 2), conv_kernel=(4, 3, 2), hidden_size=32, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=64, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        hidden_dropout=0.0, activation_dropout=0.0, attention_dropout=0.0, feat_proj_dropout=0.0, layerdrop=0.0,
        apply_spec_augment=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return HubertModel(config).train()


def gradients(model: nn.Module, autocast: bool = False) -> list[Tensor]:
    sound = torch.randn(2, 4000, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        hidden = model(sound).last_hidden_state
    hidden.float().square().sum().backward()
    return [each.grad for each in model.parameters() if each.grad is not None]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for each convolution that ran as a function of ours."""
    found: list[int] = []
    stock = convolutions.convolution
    monkeypatch.setattr(convolutions, "convolution", lambda *given: found.append(0) or stock(*given))
    return found


@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_are_bitwise_those_of_stock_convolutions(
    autocast: bool, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = memopt.patch(hubert())
    expected = gradients(copy.deepcopy(model), autocast)
    assert not calls  # the inputs are small
    monkeypatch.setattr(convolutions, "LARGE", 1)
    found = gradients(model, autocast)
    assert len(calls) >= 2
    assert all(map(torch.equal, expected, found))


def test_a_frozen_stem_another_layout_and_unpatched_models_run_the_stock_convolution(
    calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolutions, "LARGE", 1)
    model = memopt.patch(hubert())
    model.feature_extractor._freeze_parameters()
    gradients(model)
    assert not calls
    assert convolutions.is_convolution(nn.Conv2d(4, 4, 3))
    assert not convolutions.is_convolution(nn.Conv2d(4, 4, 3, padding="same"))
    assert not convolutions.is_convolution(nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"))
    assert not convolutions.is_convolution(nn.ConvTranspose2d(4, 4, 3))
    assert not convolutions.is_convolution(torch.nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 4, 3)))
    memopt.unpatch(model)
    assert type(model.feature_extractor.conv_layers[1].conv) is nn.Conv1d


def test_checkpointed_it_computes_the_same(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutions, "LARGE", 1)
    model = memopt.patch(hubert())
    expected = gradients(copy.deepcopy(model))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert all(map(torch.equal, expected, gradients(model)))


def test_a_model_in_which_convolutions_alone_are_exchanged_is_patched() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.SiLU(), nn.Conv2d(8, 8, 3)).double()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    stock = copy.deepcopy(model)
    memopt.patch(model, inputs={"input": x})
    for each in (stock, model):
        each(x).square().sum().backward()
    pairs = zip(stock.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)
    assert "1 activation: 1 recomputed" in str(memopt.summary(model))


@pytest.mark.parametrize("in_place", [nn.SiLU(inplace=True), nn.LeakyReLU(0.1, inplace=True), nn.ELU(inplace=True)])
def test_an_activation_in_place_is_not_called_random(in_place: nn.Module) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), in_place, nn.Conv2d(8, 8, 3))
    plan = memopt.plan_for(model, "exact-unfolded", inputs={"input": torch.randn(2, 3, 8, 8)})
    (reason,) = (entry.reason for entry in plan.refusals if entry.kind == "activation")
    assert reason == "it writes into its input, from which it would be recomputed"
