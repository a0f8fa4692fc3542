"""Products whose rows are weighted: PyTorch's values to the bit, gradients as right as PyTorch's, no product more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from memopt.kernels.linear.weighted import Product, weighted
from memopt.torch_compat import TorchDispatchMode

ROWS, IN, OUT, EXPERTS = 24, 16, 32, 3
OFFSETS = torch.tensor([8, 8, ROWS], dtype=torch.int32)
CHOSEN = torch.tensor([0] * 8 + [2] * (ROWS - 8))
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


#: Form -> (a, matrix, bias, the product of them as modules write it, and as :class:`Product` says it).
Form = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], Callable[..., Tensor], Callable[..., Product]]
FORMS: dict[str, Form] = {
    "linear": (
        (ROWS, IN), (OUT, IN), (OUT,), F.linear, lambda a, w, b: Product(a, w.t(), bias=b),
    ),
    "linear of batches": (
        (4, ROWS // 4, IN), (OUT, IN), (OUT,), F.linear, lambda a, w, b: Product(a, w.t(), bias=b),
    ),
    "product": (
        (ROWS, IN), (IN, OUT), (OUT,), lambda a, w, b: a @ w + b, lambda a, w, b: Product(a, w, bias=b),
    ),
    "a matrix for each row": (
        (ROWS, 1, IN), (ROWS, IN, OUT), (EXPERTS, OUT),
        lambda a, w, b: torch.bmm(a, w).squeeze(1) + b[CHOSEN],
        lambda a, w, b: Product(a, w, bias=b[CHOSEN], chosen=(b, CHOSEN)),
    ),
    "grouped": (
        (ROWS, IN), (EXPERTS, OUT, IN), (EXPERTS, OUT),
        lambda a, w, b: F.grouped_mm(a, w.mT, offs=OFFSETS) + b[CHOSEN],
        lambda a, w, b: Product(a, w.mT, OFFSETS, bias=b[CHOSEN], chosen=(b, CHOSEN)),
    ),
    "grouped, by rows": (
        (ROWS, IN), (EXPERTS, IN, OUT), (EXPERTS, OUT),
        lambda a, w, b: F.grouped_mm(a, w, offs=OFFSETS) + b[CHOSEN],
        lambda a, w, b: Product(a, w, OFFSETS, bias=b[CHOSEN], chosen=(b, CHOSEN)),
    ),
}  # fmt: skip


def leaves(form: str, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """a, matrix, bias and the rows' weights; some are zero, where ds cannot be had from da."""
    shapes = FORMS[form][:3]
    a, matrix, bias = (random(*shape, seed=seed + i) for i, shape in enumerate(shapes))
    s = random(*a.shape[:-1], 1, seed=seed + 3).abs().reshape(*y_shape(a)[:-1], 1)
    s[s > 1.5] = 0
    s.view(-1)[:2] = 0
    return [each.to(dtype).requires_grad_() for each in (a, matrix / IN**0.5, bias, s)]


def y_shape(a: Tensor) -> tuple[int, ...]:
    return (ROWS, OUT) if a.dim() == 3 and a.size(1) == 1 else (*a.shape[:-1], OUT)


def stock(form: str, a: Tensor, matrix: Tensor, bias: Tensor, s: Tensor) -> Tensor:
    return FORMS[form][3](a, matrix, bias) * s


def ours(form: str, a: Tensor, matrix: Tensor, bias: Tensor, s: Tensor) -> Tensor:
    _, _, _, of_module, said = FORMS[form]
    y, product = of_module(a, matrix, bias), said(a, matrix, bias)
    return weighted(y, s, Product(**{**vars(product), "dtype": y.dtype}))


def gradients(run: Any, form: str, inputs: list[Tensor], dz: Tensor) -> list[Tensor]:
    wanted = [each for each in inputs if each.requires_grad]
    return list(torch.autograd.grad(run(form, *inputs), wanted, dz.to(inputs[0].dtype)))


def error(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_the_value_is_pytorchs_and_gradients_are_as_right(form: str, dtype: torch.dtype) -> None:
    if dtype is torch.float64 and "grouped" in form:
        pytest.skip("PyTorch has no grouped product in fp64")
    errors: list[list[tuple[float, float]]] = []
    for seed in range(0, 40, 4):
        inputs = leaves(form, dtype, seed)
        dz = random(*y_shape(inputs[0]), seed=seed + 99).to(dtype)
        assert torch.equal(ours(form, *inputs), stock(form, *inputs))
        wide = [each.detach().double().requires_grad_() for each in inputs]
        truth = gradients(_in_fp64, form, wide, dz)
        both = [gradients(run, form, inputs, dz) for run in (ours, stock)]
        assert torch.equal(both[0][1], both[1][1])  # of the matrix
        assert torch.equal(both[0][2], both[1][2])  # of the bias
        errors.append([(error(a, t), error(b, t)) for a, b, t in zip(*both, truth, strict=True)])
    for of_one in zip(*errors, strict=True):
        mine, its = (sum(each) / len(each) for each in zip(*of_one, strict=True))
        assert mine <= 1.25 * its + 4 * torch.finfo(torch.float64).eps


def _in_fp64(form: str, a: Tensor, matrix: Tensor, bias: Tensor, s: Tensor) -> Tensor:
    if "grouped" not in form:
        return stock(form, a, matrix, bias, s)
    m = matrix.mT if form == "grouped" else matrix
    return (torch.cat([a[:8] @ m[0], a[8:] @ m[2]]) + bias[CHOSEN]) * s


@pytest.mark.parametrize("frozen", [(1,), (2,), (1, 2)])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_frozen_gets_no_gradient_and_changes_no_other(form: str, frozen: tuple[int, ...]) -> None:
    inputs = leaves(form, torch.float32)
    dz = random(*y_shape(inputs[0]), seed=9).float()
    expected = gradients(ours, form, inputs, dz)
    for place in frozen:
        inputs[place].requires_grad_(False)
    found = gradients(ours, form, inputs, dz)
    left = [each for place, each in enumerate(expected) if place not in frozen]
    assert all(map(torch.equal, found, left))


@pytest.mark.parametrize("shape", [(ROWS, 1), (1, 1), (1,), ()])
def test_weights_may_be_broadcast(shape: tuple[int, ...]) -> None:
    *inputs, _ = leaves("linear", torch.float64)
    s, dz = random(*shape, seed=5).requires_grad_(), random(ROWS, OUT, seed=9)
    for found, expected in zip(*(gradients(run, "linear", [*inputs, s], dz) for run in (ours, stock)), strict=True):
        assert found.shape == expected.shape
        assert error(found, expected) < 1e-14


def test_a_gradient_that_was_expanded_is_read_as_it_is() -> None:
    """The sum over the experts of a token leaves it without memory of its own."""
    for form in FORMS:
        inputs = leaves(form, torch.float32)
        dz = random(OUT, seed=9).float().expand(y_shape(inputs[0]))
        for found, expected in zip(*(gradients(run, form, inputs, dz) for run in (ours, stock)), strict=True):
            assert error(found, expected.double()) < 1e-6


def test_weights_may_be_wider_than_the_product() -> None:
    inputs = leaves("linear", torch.bfloat16)
    inputs[3] = inputs[3].detach().float().requires_grad_()
    assert torch.equal(ours("linear", *inputs), stock("linear", *inputs))
    dz = random(ROWS, OUT, seed=9).float()
    doubles = [each.detach().double().requires_grad_() for each in inputs]
    truth = torch.autograd.grad(stock("linear", *doubles), doubles, dz.double())
    both = [torch.autograd.grad(run("linear", *inputs), inputs, dz) for run in (ours, stock)]
    for mine, its, right in zip(*both, truth, strict=True):
        assert mine.dtype == its.dtype
        # dz is rounded for the product, as y is in PyTorch's: both to half a unit of bf16.
        assert error(mine, right) <= max(1.25 * error(its, right), torch.finfo(torch.bfloat16).eps / 2)


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += str(func).split(".")[1] in ("mm", "addmm", "bmm", "_grouped_mm")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("form", FORMS)
def test_backward_takes_no_product_more_than_pytorchs(form: str) -> None:
    counts = []
    for run in (ours, stock):
        inputs = leaves(form, torch.float32)
        z = run(form, *inputs)
        with Products() as products:
            torch.autograd.grad(z, inputs, torch.ones_like(z))
        counts.append(products.count)
    assert counts == [2, 2]


def test_it_has_no_second_derivative_and_says_so() -> None:
    inputs = leaves("linear", torch.float64)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(ours("linear", *inputs).sum(), inputs, create_graph=True)
