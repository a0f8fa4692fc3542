"""Models that are hard to patch: each is patched rightly, or left alone. Judged by outputs and gradients in fp64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memopt
from memopt.errors import NegativeVerdict
from memopt.walk.calls.outputs import output_tensors
from tests.walk import toys

WIDTH = toys.WIDTH


class Block(nn.Module):
    """A pre-norm block with a gated MLP; subclasses spoil one thing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.gate, self.up = nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH)
        self.act: nn.Module = nn.SiLU()

    def forward(self, x: Tensor) -> Any:
        h = self.norm(x)
        return x + self.down(self.act(self.gate(h)) * self.up(h))


class InPlaceActivation(Block):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.SiLU(inplace=True)


class NormOutputChangedInPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        h.mul_(1.5)
        return x + self.down(self.act(self.gate(h)) * self.up(h))


class NormOutputChangedAfterItWasRead(Block):
    """Stock keeps the changed value and refuses to differentiate; memopt recomputes the value that was read."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        y = self.down(self.act(self.gate(h)) * self.up(h))
        h.mul_(1.5)
        return x + y


class ProductChangedInPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        product = self.act(self.gate(h)) * self.up(h)
        product.clamp_(-0.5, 0.5)
        return x + self.down(product)


class ResidualAddedInPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.act(self.gate(self.norm(x))))
        return y.add_(x)


class BranchOnValues(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        if bool((h.sum() > 0).item()):
            h = h * 2
        return x + self.down(self.act(self.gate(h)) * self.up(h))


class AnotherPathInTraining(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        if not self.training:
            return self.down(self.act(self.gate(h)) * self.up(h))
        return x + self.down(F.gelu(self.gate(h))) + self.norm(h)


class LayerDrop(nn.Module):
    """Skips layers at random, as some encoders do while they train."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.training or torch.rand(()) > 0.4:
                x = layer(x)
        return x


class WeightTiedAcrossLayers(LayerDrop):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers[1:]:
            layer.gate.weight = self.layers[0].gate.weight
            layer.norm.weight = self.layers[0].norm.weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class OneModuleTwoInputs(Block):
    """The same block on its own output, and its activation on something else besides."""

    def forward(self, x: Tensor) -> Any:
        once = super().forward(x)
        twice = super().forward(once)
        return twice, self.act(x), self.norm(twice)


class HalfWithoutGradients(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = super().forward(x)
        return super().forward(x) - target.detach()


class KeptOnTheModule(Block):
    """Leaves tensors for its next call."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        if self.last is not None:
            h = h + self.last
        self.last = h.detach()
        return x + self.down(self.act(self.gate(h)) * self.up(h))


class NormCalledAsAMethod(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm.forward(x)
        return x + self.down(self.act.forward(self.gate(h)) * self.up.forward(h))


class SwappedWhileRunning(Block):
    """Replaces its activation by another one after the first call."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.act = nn.GELU()
        return y


class NormOverAView(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x.transpose(0, 1)).transpose(0, 1)[:, 1:]
        return x[:, 1:] + self.down(self.act(self.gate(h)) * self.up(h))


class ComplexOutput(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return torch.complex(y, self.norm(y))


BLOCKS = [
    Block, InPlaceActivation, NormOutputChangedInPlace, ProductChangedInPlace, ResidualAddedInPlace, BranchOnValues,
    AnotherPathInTraining, LayerDrop, WeightTiedAcrossLayers, OneModuleTwoInputs, HalfWithoutGradients, KeptOnTheModule,
    NormCalledAsAMethod, SwappedWhileRunning, NormOverAView, ComplexOutput,
]  # fmt: skip


def built(make: type[nn.Module]) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = make()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.6)
    return model.double(), torch.randn(3, 5, WIDTH, dtype=torch.float64)


def results(model: nn.Module, x: Tensor, training: bool, calls: int = 2) -> list[Tensor]:
    """Outputs of some calls in a row, and the gradients of all of them together."""
    model.train(training)
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    outputs = [t for _ in range(calls) for _, t in output_tensors(model(x))]
    inputs = [x, *model.parameters()]
    real = [torch.view_as_real(t) if t.is_complex() else t for t in outputs if t.requires_grad]
    loss = sum((t * t).sum() for t in real)
    found = torch.autograd.grad(loss, inputs, allow_unused=True)
    gradients = (torch.zeros_like(i) if g is None else g for i, g in zip(inputs, found, strict=True))
    return [*(t.detach() for t in outputs), *gradients]


def assert_same(model: nn.Module, patched: nn.Module, x: Tensor) -> None:
    for training in (True, False):
        one, other = (results(copy.deepcopy(m), x, training) for m in (model, patched))
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def patched_copy(model: nn.Module, x: Tensor) -> nn.Module | None:
    """None where nothing can be patched, which is an answer too."""
    try:
        return memopt.patch(copy.deepcopy(model), inputs={"x": x})
    except NegativeVerdict:
        return None


@pytest.mark.parametrize("make", BLOCKS, ids=lambda make: make.__name__)
def test_a_nasty_block_computes_what_it_did(make: type[nn.Module]) -> None:
    model, x = built(make)
    patched = patched_copy(model, x)
    assert patched is not None
    assert_same(model, patched, x)


@pytest.mark.parametrize("toy", list(toys.VERDICTS), ids=lambda toy: toy.__name__)
def test_a_toy_of_the_walk_computes_what_it_did(toy: type[toys.Toy]) -> None:
    model, x = toys.build(toy)
    if not x.is_floating_point() or toy is toys.ReadByNumpy:
        pytest.skip("it has no gradients")
    patched = patched_copy(model, x)
    if patched is not None:
        assert_same(model, patched, x)


def test_what_was_read_is_differentiated_whatever_became_of_it() -> None:
    model, x = built(NormOutputChangedAfterItWasRead)
    unspoilt, _ = built(Block)
    with pytest.raises(RuntimeError, match="inplace operation"):
        results(model, x, True)
    patched = patched_copy(model, x)
    assert patched is not None
    assert_same(unspoilt, patched, x)


@pytest.mark.parametrize("child", ["norm", "act", "gate", "up", "down"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hook_that_changes_an_output_is_obeyed(child: str, when: str) -> None:
    def change(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * 1.5 + 0.1

    model, x = built(Block)
    if when == "before":
        model.get_submodule(child).register_forward_hook(change)
    patched = patched_copy(model, x)
    assert patched is not None
    if when == "after":
        for candidate in (model, patched):
            candidate.get_submodule(child).register_forward_hook(change)
    assert_same(model, patched, x)
