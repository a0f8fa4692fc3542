"""Models of convolutions and batch norms: what reads a batch norm's output saves none of it."""

from __future__ import annotations

import copy
import weakref
from itertools import pairwise

import pytest
import torch
from torch import nn
from transformers import (
    MobileNetV2Config,
    MobileNetV2ForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
)

import memopt
from memopt.errors import NegativeVerdict
from memopt.patches.activation.module import _is_alone
from memopt.patches.apply import apply
from memopt.trace.account import account, live_bytes
from memopt.walk.aten.precision import precise


def resnet() -> nn.Module:
    """Two stages of two layers, ReLUs."""
    return ResNetForImageClassification(ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2]))


def mobilenet() -> nn.Module:
    """Inverted residuals, ReLUs that end at 6."""
    return MobileNetV2ForImageClassification(
        MobileNetV2Config(depth_multiplier=0.25, image_size=32, classifier_dropout_prob=0.0)
    )


def gradients(model: nn.Module, images: torch.Tensor) -> dict[str, torch.Tensor]:
    labels = torch.tensor([0, 1, 0])
    model(pixel_values=images, labels=labels).loss.backward()
    found = {name: each.grad for name, each in model.named_parameters()}
    model.zero_grad()
    return found


@pytest.mark.parametrize(("build", "most"), [(resnet, 0.8), (mobilenet, 0.5)])
def test_gradients_are_the_stock_models_from_fewer_bytes(build, most: float) -> None:
    torch.manual_seed(0)
    stock = build().double().train()
    for parameter in stock.parameters():
        nn.init.normal_(parameter, std=0.2)
    patched = memopt.patch(copy.deepcopy(stock), "exact-unfolded")
    images = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    kept = [account(model, lambda model=model: model(pixel_values=images)).total for model in (stock, patched)]
    with precise(torch.float64):
        expected, found = (gradients(model, images) for model in (stock, patched))
    scale = max(float(each.abs().max()) for each in expected.values())
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, rtol=1e-9, atol=1e-12 * scale)
    buffers = dict(patched.named_buffers())
    assert all(torch.equal(each, buffers[name]) for name, each in stock.named_buffers())
    assert kept[1] < most * kept[0]


def test_every_batch_norm_is_in_the_plan_and_can_be_left() -> None:
    model = resnet()
    plan = memopt.plan_for(model)
    norms = [name for name, each in model.named_modules() if isinstance(each, nn.BatchNorm2d)]
    assert [entry.site for entry in plan.rewrites if entry.kind == "batch_normalization"] == norms
    left = memopt.plan_for(model, memopt.load_recipe("exact-unfolded", ("norms.method=none",)))
    assert not any(entry.kind == "batch_normalization" for entry in left.rewrites)


def test_statistics_that_a_later_forward_updates_are_those_of_the_forward_in_eval_mode() -> None:
    """PyTorch updates running statistics without a trace in their versions."""
    torch.manual_seed(0)
    stock = mobilenet().double()
    for parameter in stock.parameters():
        nn.init.normal_(parameter, std=0.2)
    patched = memopt.patch(copy.deepcopy(stock), "exact-unfolded")
    images = torch.randn(3, 3, 32, 32, dtype=torch.float64)

    def convolutions(model: nn.Module) -> list[torch.Tensor]:
        loss = model.eval()(pixel_values=images, labels=torch.tensor([0, 1, 0])).loss
        with torch.no_grad():
            model.train()(pixel_values=images * 3 + 1)
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    with precise(torch.float64):
        expected, found = convolutions(stock), convolutions(patched)
    scale = max(float(each.abs().max()) for each in expected)
    for mine, each in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, each, rtol=1e-9, atol=1e-12 * scale)


class Perceptron(nn.Module):
    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(*pair) for pair in pairwise(widths)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return y


class Layer(nn.Module):
    def __init__(self, inside: int, out: int) -> None:
        super().__init__()
        self.linear, self.norm, self.activation = nn.Linear(inside, out), nn.BatchNorm1d(out), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.activation(self.norm(self.linear(x)))
        return y


def test_an_activation_between_a_batch_norm_and_a_linear_is_patched_once() -> None:
    torch.manual_seed(0)
    stock = Perceptron(6, 8, 8, 4).double()
    patched, x = copy.deepcopy(stock), torch.randn(5, 6, dtype=torch.float64)
    plan = memopt.plan_for(patched, memopt.load_recipe("exact-unfolded"), inputs={"x": x})
    applied = apply(patched, plan)
    assert not applied.refused
    assert len(applied.done["activation"]) == 3
    for model in (stock, patched):
        model(x).square().sum().backward()
    for mine, each in zip(patched.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, each.grad, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("recipe", ["exact-unfolded", "int8", "mesa", "sampled"])
@pytest.mark.parametrize("training", [False, True])
def test_an_account_sees_all_that_a_patched_step_keeps(recipe: str, training: bool) -> None:
    """In eval mode copies of the running statistics are kept, too; and no hook of an account changes what is kept."""
    torch.manual_seed(0)
    model, images = resnet().train(training), torch.randn(3, 3, 32, 32)

    def run() -> torch.Tensor:
        loss: torch.Tensor = model(pixel_values=images, labels=torch.tensor([0, 1, 0])).loss
        return loss

    stock = live_bytes(run)
    memopt.patch(model, recipe)
    model.train(training)
    counted, live = account(model, run), live_bytes(run)
    assert counted.unseen == 0
    assert counted.saved == live < stock
    copies = [each for each in counted.storages if each.cause == "weight copy"]
    assert {each.savers[0][1] for each in copies} == {"batch_norm"}


class InPlace(nn.Module):
    """Convolutions, batch norms and activations that write into their input, as timm's ResNets have them."""

    def __init__(self, activation: type[nn.Module] = nn.ReLU, *, reads_input: bool = False) -> None:
        super().__init__()
        self.reads_input = reads_input
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)
        self.norm2, self.third = nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)
        self.act, self.act2 = activation(inplace=True), activation(inplace=True)  # type: ignore[call-arg]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.first(x))
        if self.reads_input:
            self.act(y)
            alias = y  # whoever holds the input sees the output
            return self.third(self.act2(self.norm2(self.second(alias)))) + y[:, :4, 2:, 2:]
        y = self.act(y)
        z: torch.Tensor = self.third(self.act2(self.norm2(self.second(y))))
        return z


@pytest.mark.parametrize("activation", [nn.ReLU, nn.SiLU, nn.Hardswish, nn.ReLU6, nn.LeakyReLU])
@pytest.mark.parametrize("reads_input", [False, True])
def test_activations_in_place_are_recomputed_and_write_for_whoever_holds_their_input(
    activation: type[nn.Module], reads_input: bool
) -> None:
    torch.manual_seed(0)
    stock = nn.Sequential(InPlace(activation, reads_input=reads_input)).double().train()
    patched = memopt.patch(copy.deepcopy(stock))
    x = torch.randn(2, 3, 20, 20, dtype=torch.float64)
    kept = [account(model, lambda model=model: model(x)).total for model in (stock, patched)]
    with precise(torch.float64):
        results = [model(x) for model in (stock, patched)]
        for result in results:
            (result * torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view_as(result)).sum().backward()
    assert torch.equal(*results)
    pairs = zip(stock.parameters(), patched.parameters(), strict=True)
    largest = max(float(each.grad.abs().max()) for each in stock.parameters())
    for one, other in pairs:
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-9, atol=1e-12 * largest)
    rows = {entry.site: entry.action for entry in memopt.plan_for(memopt.unpatch(patched)).entries}
    assert rows["0.act"] == rows["0.act2"] == "recompute"
    assert kept[1] < 0.8 * kept[0]


class NormAct(nn.BatchNorm2d):
    """A batch norm that runs its activation itself, as timm's BatchNormAct2d."""

    def __init__(self, channels: int, activation: nn.Module) -> None:
        super().__init__(channels)
        self.act = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.act(super().forward(x))
        return result


@pytest.mark.parametrize(
    "activation", [nn.ReLU(inplace=True), nn.SiLU(inplace=True), nn.GELU(), nn.Identity()], ids=lambda each: str(each)
)
def test_a_batch_norm_that_runs_its_activation_is_a_batch_norm(activation: nn.Module) -> None:
    torch.manual_seed(0)
    layers = [(nn.Conv2d(8 if i else 3, 8, 3, bias=False), NormAct(8, copy.deepcopy(activation))) for i in range(3)]
    stock = nn.Sequential(nn.Sequential(*(each for layer in layers for each in layer), nn.Conv2d(8, 4, 1))).double()
    patched, x = copy.deepcopy(stock), torch.randn(2, 3, 20, 20, dtype=torch.float64)
    plan = memopt.plan_for(patched, inputs={"input": x})
    assert {entry.site for entry in plan.rewrites if entry.kind == "batch_normalization"} == {"0.1", "0.3", "0.5"}
    memopt.patch(patched, inputs={"input": x})
    kept = [account(model, lambda model=model: model(x)).total for model in (stock, patched)]
    assert kept[1] < 0.7 * kept[0]
    with precise(torch.float64):
        for model in (stock, patched):
            model(x).square().sum().backward()
    largest = max(float(each.grad.abs().max()) for each in stock.parameters())
    for one, other in zip(stock.parameters(), patched.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-9, atol=1e-12 * largest)


def test_convolutions_alone_are_nothing_to_patch() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 1))
    with pytest.raises(NegativeVerdict, match="Nothing in this model can be patched"):
        memopt.patch(model, inputs={"input": torch.randn(2, 3, 20, 20)})


@pytest.mark.parametrize("activation", [nn.ReLU, nn.SiLU])
def test_an_alias_of_an_input_in_place_sees_the_output(activation: type[nn.Module]) -> None:
    torch.manual_seed(0)
    stock = nn.Sequential(InPlace(activation)).train()
    patched = memopt.patch(copy.deepcopy(stock))
    x = torch.randn(2, 3, 20, 20)
    seen: list[torch.Tensor] = []
    for model in (stock, patched):
        model[0].norm.register_forward_hook(lambda module, args, output: seen.append(output.detach()))
        model(x).sum().backward()
    assert float(seen[0].min()) > -0.3  # of a batch norm it is below -1
    assert torch.equal(*seen)
    for one, other in zip(stock.parameters(), patched.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad)


def test_an_input_in_place_that_something_else_holds_is_not_exchanged() -> None:
    def made() -> torch.Tensor:
        return nn.Linear(3, 4)(torch.randn(2, 3))  # type: ignore[no-any-return]

    assert _is_alone(made())
    saved = made()
    sine = saved.sin()  # its node has saved the tensor
    viewed, watched = made(), made()
    view, reference = viewed.detach(), weakref.ref(watched)
    assert not any(map(_is_alone, (saved, viewed, watched)))
    del sine, view, reference
    assert all(map(_is_alone, (saved, viewed, watched)))
