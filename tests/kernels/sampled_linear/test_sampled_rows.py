"""Norms of rows, the gather and the weight gradient of sampled rows: values, dtypes, layouts and edges."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from memopt.kernels.sampled_linear.function import gather_rows, row_norms, sampled_weight_gradient
from memopt.kernels.sampled_linear.sampling import METHODS, Method, sample_rows

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def some_rows(n: int, k: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(n, (k,), generator=generator, dtype=torch.int32), torch.rand(k, generator=generator) * 3


def eps_of(dtype: torch.dtype) -> float:
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps


@every_dtype
@pytest.mark.parametrize("shape", [(5, 7), (1, 1), (300, 64), (0, 4), (4, 0)])
def test_norms_are_those_of_the_rows(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = draw(*shape, dtype=dtype)
    norms = row_norms(x)
    assert norms.shape == shape[:1]
    assert norms.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(norms.double(), x.double().square().sum(1).sqrt(), rtol=4 * eps_of(dtype), atol=0)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_norms_of_every_magnitude_are_kept(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    # The largest that fp32 can hold after the sum of four squares, and the smallest but for those below its normals.
    for size in (min(limits.max, 1e38) / 2, max(limits.tiny, 1e-37)):
        norms = row_norms(torch.full((2, 4), size, dtype=dtype))
        assert norms.double().tolist() == pytest.approx([2 * size] * 2, rel=limits.eps)
    mixed = torch.tensor([[limits.max / 4, limits.tiny, 0.0]], dtype=dtype)
    assert float(row_norms(mixed)) == pytest.approx(limits.max / 4, rel=limits.eps)


@every_dtype
def test_a_row_that_is_not_finite_is_so_in_its_norm_and_no_other(dtype: torch.dtype) -> None:
    x = draw(4, 5, dtype=dtype)
    x[0, 1], x[1, 2], x[2, 3] = math.nan, math.inf, -math.inf
    norms = row_norms(x)
    assert norms[0].isnan()
    assert norms[1:3].tolist() == [math.inf] * 2
    assert norms[3].isfinite()


LAYOUTS = {
    "sliced rows": lambda t: torch.cat((t, t), 1)[:, : t.size(1)],
    "every other row": lambda t: torch.stack((t, t), 1)[:, 0],
    "transposed": lambda t: t.t().contiguous().t(),
    "shifted": lambda t: torch.cat((t.new_zeros(1), t.reshape(-1)))[1:].view_as(t),
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


@every_layout
@every_dtype
def test_layouts_do_not_matter(dtype: torch.dtype, layout: str) -> None:
    x, dy = draw(30, 12, dtype=dtype), draw(30, 8, dtype=dtype, seed=1)
    rows, weights = some_rows(30, 11)
    other_x, other_dy = LAYOUTS[layout](x), LAYOUTS[layout](dy)
    torch.testing.assert_close(row_norms(other_x), row_norms(x), rtol=4 * eps_of(dtype), atol=0)
    kept = gather_rows(other_x, rows)
    assert torch.equal(kept, x[rows])
    assert kept.is_contiguous()
    expected = sampled_weight_gradient(dy, kept, rows, weights)
    made = sampled_weight_gradient(other_dy, LAYOUTS[layout](kept), rows, weights)
    torch.testing.assert_close(made, expected)


def test_one_gradient_for_all_rows_is_read_as_it_is_expanded() -> None:
    x, (rows, weights) = draw(30, 12), some_rows(30, 11)
    dy = torch.ones(1, 1).expand(30, 8)
    expected = (weights[:, None] * x[rows]).sum(0).expand(8, 12)
    torch.testing.assert_close(sampled_weight_gradient(dy, x[rows], rows, weights), expected)


@every_dtype
@pytest.mark.parametrize(("n", "k", "ins", "outs"), [(30, 11, 12, 8), (5, 9, 3, 1), (200, 60, 33, 65), (4, 1, 1, 1)])
def test_the_gradient_is_the_weighted_sum(n: int, k: int, ins: int, outs: int, dtype: torch.dtype) -> None:
    dy, x, (rows, weights) = draw(n, outs, dtype=dtype, seed=1), draw(n, ins, dtype=dtype), some_rows(n, k)
    kept = gather_rows(x, rows)
    made = sampled_weight_gradient(dy, kept, rows, weights)
    assert (made.shape, made.dtype) == ((outs, ins), dtype)
    scaled = dy[rows].double() * weights[:, None].double()
    truth = scaled.t() @ kept.double()
    # One rounding of each weighted gradient, k + 1 of the sum in fp32 (fp64), one of the result.
    half = torch.finfo(dtype).eps / 2
    sizes = scaled.abs().t() @ kept.double().abs()
    allowed = (half + (k + 1) * eps_of(dtype)) * sizes + half * truth.abs()
    allowed += k * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps * 8
    assert ((made.double() - truth).abs() <= allowed).all()


def test_weights_are_applied_in_fp32_and_rounded_once() -> None:
    # In bf16 the weight would be 1 and the product 1.5.
    dy, kept = torch.full((1, 1), 1.5, dtype=torch.bfloat16), torch.ones(1, 1, dtype=torch.bfloat16)
    weights = torch.tensor([1 + 0.45 * 2**-7])
    made = sampled_weight_gradient(dy, kept, torch.zeros(1, dtype=torch.int32), weights)
    assert float(made) == 1.5 + 2**-7


def test_a_gradient_of_another_dtype_is_scaled_before_it_is_rounded() -> None:
    dy, x, (rows, weights) = draw(30, 8, seed=1), draw(30, 12, dtype=torch.bfloat16), some_rows(30, 11)
    kept = gather_rows(x, rows)
    made = sampled_weight_gradient(dy, kept, rows, weights)
    expected = (dy[rows] * weights[:, None]).bfloat16().t() @ kept
    assert made.dtype == torch.bfloat16
    assert torch.equal(made, expected)


@pytest.mark.parametrize("method", METHODS)
def test_rows_that_all_fit_give_the_exact_gradient(method: Method) -> None:
    x, dy = draw(40, 6, dtype=torch.float64), draw(40, 5, dtype=torch.float64, seed=1)
    x[13:] = 0
    rows, weights = sample_rows(row_norms(x) * row_norms(dy), 20, method)
    made = sampled_weight_gradient(dy, gather_rows(x, rows), rows, weights)
    torch.testing.assert_close(made, dy.t() @ x, rtol=1e-12, atol=1e-12)


def test_no_rows_give_zeros_and_weights_that_are_nan_give_nan() -> None:
    dy, none = draw(5, 3), torch.empty(0, dtype=torch.int32)
    assert not sampled_weight_gradient(dy, gather_rows(draw(5, 4), none), none, torch.empty(0)).any()
    assert sampled_weight_gradient(dy, dy[:1], none.new_zeros(1), torch.full((1,), math.nan)).isnan().all()


def test_nothing_is_recorded_for_backward() -> None:
    x, (rows, weights) = draw(9, 3).requires_grad_(), some_rows(9, 4)
    kept = gather_rows(x, rows)
    assert not any(t.requires_grad for t in (row_norms(x), kept, sampled_weight_gradient(x, kept, rows, weights)))


@every_dtype
def test_fake_tensors_have_the_shapes_of_real_ones(dtype: torch.dtype) -> None:
    def run(dy: Tensor, x: Tensor, rows: Tensor, weights: Tensor) -> list[tuple[object, ...]]:
        kept = gather_rows(x, rows)
        results = (row_norms(x), kept, sampled_weight_gradient(dy, kept, rows, weights))
        return [(t.shape, t.dtype, t.stride()) for t in results]

    arguments = (draw(9, 5, dtype=dtype), draw(9, 3, dtype=dtype), *some_rows(9, 4))
    with FakeTensorMode() as mode:
        fake = run(*(mode.from_tensor(t) for t in arguments))
    assert fake == run(*arguments) == run(*(t.to("meta") for t in arguments))
