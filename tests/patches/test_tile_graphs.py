"""What a module that runs by tiles knows of gradients, and which of its outputs and parameters have one."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from memopt.patches.tile import module as tiles
from memopt.patches.tile.module import patch_tiles
from memopt.patches.tile.probe import numbers_by_row
from tests.patches.test_tile import MLP, X

pytestmark = pytest.mark.usefixtures("small")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of five tokens."""
    monkeypatch.setattr(tiles, "_STEP", 5)
    monkeypatch.setattr(tiles, "_COPIES", 1 << 30)


class Experts(nn.Module):
    """Two experts that get tokens and one that gets none; returns the router's probabilities, detached, as well."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.experts = nn.Linear(8, 3), nn.ModuleList(MLP() for _ in range(3))
        with torch.no_grad():
            self.router.bias[2] = -1e3

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        p = self.router(x).softmax(-1)
        chosen, y = p.argmax(-1), torch.zeros_like(x)
        for place, expert in enumerate(self.experts):
            mine = chosen == place
            if mine.any():
                y[mine] = expert(x[mine]) * p[mine][:, place : place + 1]
        return y, p.detach()


class AsksForGradients(MLP):
    def forward(self, x: Tensor) -> Tensor:
        act = F.gelu if torch.is_grad_enabled() else F.relu  # a kernel for inference, say
        return self.down(act(self.up(x)))


def both(module: nn.Module) -> tuple[nn.Module, nn.Module]:
    ours = copy.deepcopy(module).double()
    patch_tiles(ours, 40, 1)
    return ours, module.double()


def test_an_output_without_a_gradient_has_none_and_may_be_a_weight() -> None:
    results = []
    for module in both(Experts()):
        x, scale = X.clone().requires_grad_(), torch.ones((), dtype=torch.float64, requires_grad=True)
        y, p = checkpoint(module, x, use_reentrant=False)
        assert y.requires_grad
        assert not p.requires_grad
        (y.sin().sum() + (p * scale).square().sum()).backward()
        results.append([x.grad, scale.grad, *(each.grad for each in module.parameters())])
    assert [each is None for each in results[0]] == [each is None for each in results[1]]
    torch.testing.assert_close(*[[each for each in its if each is not None] for its in results])


def test_hooks_of_parameters_that_no_token_reaches_are_not_called() -> None:
    called = []
    for module in both(Experts()):
        names: list[str] = []
        for name, parameter in module.named_parameters():
            parameter.register_hook(lambda gradient, name=name, names=names: names.append(name) or gradient * 2)
        checkpoint(module, X.clone().requires_grad_(), use_reentrant=False)[0].sin().sum().backward()
        called.append(names)
    assert sorted(called[0]) == sorted(called[1])
    assert not any(name.startswith("experts.2") for name in called[0])


def test_a_module_reads_that_gradients_are_on_as_in_stock() -> None:
    ours, stock = both(AsksForGradients())
    torch.testing.assert_close(
        checkpoint(ours, X.clone().requires_grad_(), use_reentrant=False),
        checkpoint(stock, X.clone().requires_grad_(), use_reentrant=False),
    )


@pytest.mark.parametrize("trains", [False, True])
def test_rows_that_mix_only_with_or_without_gradients_are_found(trains: bool) -> None:
    class Mixes(MLP):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y + y.mean(1, keepdim=True) if torch.is_grad_enabled() is trains else y

    assert numbers_by_row(Mixes(), 8) == 0


def test_one_tile_has_a_graph_at_a_time() -> None:
    class Here:
        pass

    alive: list[weakref.ref[Here]] = []
    most: list[int] = []

    class Watched(MLP):
        def forward(self, x: Tensor) -> Tensor:
            most.append(sum(each() is not None for each in alive))
            hidden = self.up(x).square()
            if hidden.grad_fn is not None:  # nodes take no weak references, but keep what is in their metadata
                hidden.grad_fn.metadata["here"] = here = Here()
                alive.append(weakref.ref(here))
            return self.down(hidden)

    ours, _ = both(Watched())
    gc.collect()
    checkpoint(ours, X.clone().requires_grad_(), use_reentrant=False).sum().backward()
    assert len(most) > 5
    assert max(most) == 0
