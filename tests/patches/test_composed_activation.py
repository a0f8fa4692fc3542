"""Functions of a linear's output, written out in one module with it, keep that output only (as in ESM)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor, nn

import memopt
from memopt.patches.activation.module import patch_activation
from memopt.patches.swap import unswap
from memopt.trace.account import account, live_bytes
from memopt.walk.probes.elementwise import probe_activation
from memopt.walk.sites import ActivationSite
from tests.support.compare import all_equal


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


class Composed(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor] = gelu) -> None:
        super().__init__()
        self.dense, self.function = nn.Linear(6, 7), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.dense(x))


class Residual(Composed):
    def forward(self, x: Tensor) -> Tensor:
        return gelu(self.dense(x)) + x.sum()


class Twice(Composed):
    def forward(self, x: Tensor) -> Tensor:
        return gelu(self.dense(x) + self.dense(2 * x))


class Noisy(Composed):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(gelu(self.dense(x)), 0.1, self.training)


class Scaled(Composed):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * gelu(self.dense(x))


class TwoLinears(Composed):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(6, 7)

    def forward(self, x: Tensor) -> Tensor:
        return gelu(self.dense(x))


def test_a_function_behind_its_linear_is_found() -> None:
    probe = probe_activation(Composed())
    assert probe is not None
    assert (probe.kind, probe.linear, probe.replays) == ("gelu_erf", "dense", True)
    assert probe.operations > 1


@pytest.mark.parametrize("cls", [Residual, Twice, Noisy, Scaled, TwoLinears])
def test_anything_more_is_left(cls: type[Composed]) -> None:
    assert probe_activation(cls()) is None


@pytest.mark.parametrize("function", [nn.functional.gelu, lambda z: 3 * z + 1, lambda z: z.softmax(-1) * z])
def test_single_operations_scales_and_mixes_are_left(function: Callable[[Tensor], Tensor]) -> None:
    assert probe_activation(Composed(function)) is None


def _patched(stock: nn.Module) -> nn.Module:
    probe = probe_activation(stock)
    assert probe is not None
    module = copy.deepcopy(stock)
    patch_activation(module, ActivationSite("", probe.kind, True, probe.operations, linear=probe.linear))
    return module


def _gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    y = module(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *(p for p in module.parameters() if p.requires_grad)])]


def _same(stock: nn.Module, patched: nn.Module, x: Tensor) -> bool:
    return all_equal(_gradients(stock, x), _gradients(patched, x))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()


def test_values_and_gradients_are_stocks_and_one_tensor_is_kept(x: Tensor) -> None:
    stock = Composed(lambda z: z * torch.sigmoid(1.702 * z))
    patched = _patched(stock)
    assert _same(stock, patched, x)
    assert live_bytes(lambda: patched(x * 1.0)) == live_bytes(lambda: stock.dense(x * 1.0)) + 4 * 7 * 4
    unswap(patched)
    assert live_bytes(lambda: patched(x * 1.0)) == live_bytes(lambda: stock(x * 1.0))


def test_a_linear_that_is_replaced_or_watched_runs(x: Tensor) -> None:
    stock = Composed()
    patched = _patched(stock)
    for module in (stock, patched):
        torch.manual_seed(1)
        module.dense = nn.Sequential(module.dense, nn.Linear(7, 7))  # as an adapter does
        module.dense.register_forward_hook(lambda module, args, output: 2 * output)
    expected, actual = _gradients(stock, x), _gradients(patched, x)
    for one, other in zip(expected, actual, strict=True):
        torch.testing.assert_close(one, other)


def test_frozen_inputs_and_weights_run_as_stock(x: Tensor) -> None:
    stock = Composed().requires_grad_(False)
    patched = _patched(stock)
    assert torch.equal(patched(x.detach()), stock(x.detach()))
    with torch.no_grad():
        assert torch.equal(patched(x), stock(x))


def test_esm_is_rewritten_where_it_composes_its_gelu() -> None:
    config = transformers.EsmConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        pad_token_id=1, mask_token_id=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.EsmForMaskedLM(config).train()
    tokens = torch.arange(4, 20).reshape(2, 8)
    before = account(model, lambda: model(input_ids=tokens).logits).total
    memopt.patch(model)
    after = account(model, lambda: model(input_ids=tokens).logits)
    # Of each layer's gelu: x / sqrt(2), x * 0.5, 1 + erf and the product were kept, the linear's output is.
    assert before - after.total >= 2 * 3 * (2 * 8 * 64 * 4)
