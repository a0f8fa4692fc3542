"""A sampled linear is the stock one but for the gradient of its weight, and that is right on average."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import memopt
from memopt.kernels.sampled_linear.sampling import METHODS, expected_error, rows_kept
from memopt.patches.sampled_linear.module import SampledLinearRewrite, patch_sampled_linear
from memopt.patches.sampled_linear.slot import Sampling
from memopt.patches.swap import swap_state, unswap
from memopt.saved.scope import RecomputeScope

WIDTH, OUT, ROWS = 16, 24, 40
SAMPLING = Sampling("systematic", 0.3)
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def linear(kind: str = "linear", *, bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    if kind == "conv1d":
        module: nn.Module = Conv1D(OUT, WIDTH)
        nn.init.normal_(module.bias)
        return module.to(dtype)
    return nn.Linear(WIDTH, OUT, bias=bias, dtype=dtype)


def both(module: nn.Module, sampling: Sampling = SAMPLING) -> tuple[nn.Module, nn.Module]:
    patched = copy.deepcopy(module)
    patch_sampled_linear(patched, sampling)
    return module, patched


def given(shape: tuple[int, ...] = (4, 10), dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class Result:
    def __init__(self, module: nn.Module, x: Tensor, seed: int = 0, autocast: bool = False) -> None:
        """Backward of a module whose input nobody else holds."""
        module.zero_grad()
        x = x.clone().requires_grad_()
        torch.manual_seed(seed)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), RecomputeScope():
            self.y = module(x * 1)
        gradient = torch.randn(self.y.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
        self.y.backward(gradient.to(self.y.dtype))
        bias = module._parameters.get("bias")
        self.dx, self.dbias = x.grad, None if bias is None else bias.grad
        self.dweight = module.weight.grad.clone()


def assert_equal(a: Tensor | None, b: Tensor | None) -> None:
    assert (a is None) == (b is None)
    if a is not None and b is not None:
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


# --- everything but dW -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(ROWS,), (4, 10), (2, 4, 5)], ids=str)
@pytest.mark.parametrize(("kind", "bias"), [("linear", True), ("linear", False), ("conv1d", True)])
def test_only_the_weights_gradient_differs_from_stock(
    kind: str, bias: bool, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    stock, sampled = (Result(module, given(shape, dtype)) for module in both(linear(kind, bias=bias, dtype=dtype)))
    assert_equal(sampled.y, stock.y)
    assert_equal(sampled.dx, stock.dx)
    assert_equal(sampled.dbias, stock.dbias)
    assert sampled.dweight.dtype == stock.dweight.dtype
    assert not torch.allclose(sampled.dweight, stock.dweight, rtol=0.01)


@pytest.mark.parametrize(("kind", "bias"), [("linear", True), ("linear", False), ("conv1d", True)])
def test_under_autocast_too(kind: str, bias: bool) -> None:
    stock, sampled = (Result(module, given(), autocast=True) for module in both(linear(kind, bias=bias)))
    assert stock.y.dtype == torch.bfloat16
    for name in ("y", "dx", "dbias"):
        assert_equal(getattr(sampled, name), getattr(stock, name))
    assert sampled.dweight.dtype == torch.float32


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_input_with_gaps_between_its_rows(kind: str) -> None:
    whole = given((ROWS, 2)).view(ROWS, 2 * WIDTH)
    stock, sampled = (Result(module, whole[:, WIDTH:]) for module in both(linear(kind)))
    for name in ("y", "dx", "dbias"):
        assert_equal(getattr(sampled, name), getattr(stock, name))


def test_the_module_stays_what_it_was() -> None:
    stock, patched = both(linear())
    assert isinstance(patched, nn.Linear)
    assert type(patched).__name__ == "Linear"
    assert list(patched.state_dict()) == list(stock.state_dict())
    assert repr(patched) == repr(stock)
    unswap(patched)
    assert type(patched) is nn.Linear


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_sample_as_well(how: str) -> None:
    _, patched = both(linear())
    if how == "deepcopy":
        other = copy.deepcopy(patched)
    else:
        stream = io.BytesIO()
        torch.save(patched, stream)
        stream.seek(0)
        other = torch.load(stream, weights_only=False)
    assert_equal(Result(other, given()).dweight, Result(patched, given()).dweight)


# --- dW --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        *(("linear", method) for method in METHODS),
        *(pytest.param("conv1d", method, marks=[] if method == "wta-crs" else pytest.mark.slow) for method in METHODS),
    ],
)
def test_the_mean_of_the_estimates_is_the_gradient(kind: str, method: Any) -> None:
    """Within 3 standard errors, as the sampler's closed form gives them."""
    draws, sampling = 400, Sampling(method, 0.3)
    stock, patched = both(linear(kind, dtype=torch.float64), sampling)
    x = given((ROWS,), torch.float64) * torch.linspace(0.1, 3, ROWS, dtype=torch.float64)[:, None]
    exact = Result(stock, x).dweight
    mean = torch.stack([Result(patched, x, seed).dweight for seed in range(draws)]).mean(0)
    dy = torch.randn(ROWS, OUT, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    error = expected_error(x, dy, x.norm(dim=1), rows_kept(ROWS, 0.3), method)
    assert 0.1 < error < 3
    assert float((mean - exact).norm() / exact.norm()) < 3 * error / draws**0.5


def test_a_seed_repeats_a_draw() -> None:
    _, patched = both(linear())
    assert_equal(Result(patched, given(), 1).dweight, Result(patched, given(), 1).dweight)
    assert not torch.equal(Result(patched, given(), 1).dweight, Result(patched, given(), 2).dweight)


def test_exact_where_few_rows_count() -> None:
    x = given((ROWS,), torch.float64)
    x[rows_kept(ROWS, 0.3) :] = 0
    stock, sampled = (Result(module, x) for module in both(linear(dtype=torch.float64)))
    torch.testing.assert_close(sampled.dweight, stock.dweight, rtol=1e-12, atol=1e-13)


def test_retained_graphs_give_the_same_twice() -> None:
    _, patched = both(linear())
    x = given().requires_grad_()
    with RecomputeScope():
        y = patched(x * 1)
    y.sum().backward(retain_graph=True)
    first = patched.weight.grad.clone()
    patched.zero_grad()
    y.sum().backward()
    assert_equal(first, patched.weight.grad)


# --- where nothing is sampled ----------------------------------------------------------------------------------------


def test_a_frozen_weight_is_left_alone() -> None:
    _, patched = both(linear())
    patched.weight.requires_grad_(False)
    x = given().requires_grad_()
    with RecomputeScope():
        y = patched(x * 1)
    assert any(name in y.grad_fn.name() for name in ("ViewBackward0", "Addmm"))


@pytest.mark.parametrize("autocast", [False, True])
def test_exact_where_somebody_else_holds_the_input(autocast: bool) -> None:
    stock, patched = both(linear())
    x = given()
    mine = []

    def dweight(module: nn.Module) -> Tensor:
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), RecomputeScope():
            h = leaf * 1
            mine.append(h)
            y = module(h)
        y.float().square().sum().backward()
        return module.weight.grad.clone()

    assert_equal(dweight(patched), dweight(stock))


def test_exact_outside_of_scopes() -> None:
    modules = both(linear())
    for module in modules:
        module(given() * 1).square().sum().backward()
    assert_equal(modules[1].weight.grad, modules[0].weight.grad)


def test_without_gradients_it_is_the_stock_module() -> None:
    stock, patched = both(linear())
    with torch.no_grad():
        assert_equal(patched(given()), stock(given()))


def test_double_backward_is_refused() -> None:
    _, patched = both(linear())
    x = given().requires_grad_()
    with RecomputeScope():
        y = patched(x * 1)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


@pytest.mark.parametrize(
    "module", [nn.Conv2d(3, 3, 1), nn.LayerNorm(4), nn.Embedding(4, 4)], ids=lambda m: type(m).__name__
)
def test_other_modules_are_refused(module: nn.Module) -> None:
    with pytest.raises(ValueError, match="not a linear"):
        patch_sampled_linear(module, SAMPLING)


def test_the_recipe_says_how() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.act, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.fc2(self.act(self.fc1(x)))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    recipe = memopt.load_recipe("sampled", ["linears.method=crs", "linears.budget=0.1"])
    model = memopt.patch(Model(), recipe, inputs={"x": given()})
    state = swap_state(model.layers[0].fc2)
    assert isinstance(state, SampledLinearRewrite)
    assert state.sampling == Sampling("crs", 0.1)
