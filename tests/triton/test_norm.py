"""The norms' Triton kernels: errors no larger than the PyTorch reference's, every layout, nothing out of bounds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch
import triton.language as tl
from torch import Tensor

from memopt.kernels.base.device import runs_triton
from memopt.kernels.base.launch import LaunchConfig, override
from memopt.kernels.norm import backward_triton as norm_backward_triton
from memopt.kernels.norm import forward_triton as norm_triton
from memopt.kernels.norm import ops as norm_ops
from memopt.kernels.norm.forward_triton import launch_affine, launch_backward, launch_forward
from memopt.kernels.norm.function import (
    NormArguments,
    NormSpec,
    affine,
    ms_norm,
    ms_norm_of_sum,
    norm_backward,
    normalize,
)
from memopt.saved import RecomputeScope
from tests.kernels.norm.test_norm import FAMILIES
from tests.triton.conftest import DEVICE
from tests.triton.memory import lazily_huge

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RMS, LAYER = ("rms", 0, True, False), ("layer", 0, True, True)
ALL = (True, True, True)


def draw(*shape: int, dtype: torch.dtype, scale: float = 1.0, shift: float = 0.0, seed: int = 0) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)
    return (values * scale + shift).to(DEVICE, dtype)


def parameters(family, hidden: int, dtype: torch.dtype, cast="after") -> tuple[Tensor | None, Tensor | None, NormSpec]:
    kind, offset, has_weight, has_bias = family
    weight = draw(hidden, dtype=dtype, seed=1) if has_weight else None
    bias = draw(hidden, dtype=dtype, seed=2) if has_bias else None
    return weight, bias, NormSpec(kind, 1e-5, offset, cast)


def double(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.double() for tensor in tensors]


def assert_as_good(ours: Tensor | None, reference: Tensor | None, truth: Tensor | None, terms: Tensor | None = None):
    """The error is at most 1.25 times the reference's plus one rounding of the result.

    The worst element may also have rounded, in fp32, at each of the formula's steps (five after the last sum). Where
    terms of opposite signs cancel, their sum without signs is what is rounded; `terms` is that sum.
    """
    if truth is None:
        assert ours is None
        return
    assert ours.shape == truth.shape
    terms = truth if terms is None else terms
    rounding = torch.finfo(ours.dtype).eps / 2
    steps = 5 * torch.finfo(torch.float32).eps / 2
    for size, allowance in ((root_mean_square, rounding), (largest, rounding + steps)):
        allowed = 1.25 * size(reference.double() - truth) + allowance * size(terms)
        assert size(ours.double() - truth) <= allowed


def root_mean_square(tensor: Tensor) -> Tensor:
    return tensor.square().mean().sqrt()


def largest(tensor: Tensor) -> Tensor:
    return tensor.abs().max()


def without_signs(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.double().abs() for tensor in tensors]


def check_forward(x, weight, bias, spec, dtype, kept_dtype) -> tuple[Tensor, Tensor]:
    y, x_hat, rstd = launch_forward(x, weight, bias, NormArguments(spec, x.dtype, dtype, kept_dtype))
    exact = double(x, weight, bias)
    true_x_hat, true_rstd = normalize(exact[0], spec)
    reference, reference_rstd = normalize(x, spec)
    assert x_hat.dtype == kept_dtype
    terms = None
    if spec.kind == "layer":
        terms = (exact[0].abs() + exact[0].mean(-1, keepdim=True).abs()) * true_rstd
    assert_as_good(x_hat, reference.to(kept_dtype), true_x_hat, terms)
    # The interpreter makes two operations of rsqrt, and a GPU's own is as inexact: two roundings.
    assert_as_good(rstd, reference_rstd, true_rstd, 2 * true_rstd)
    if weight is None and bias is None:
        assert y is None
    else:
        assert y.dtype == dtype
        expected = affine(reference, weight, bias, spec, x.dtype, dtype)
        check_affine(y, expected, true_x_hat, weight, bias, spec, terms)
    return x_hat, rstd


def check_affine(ours, reference, x_hat, weight, bias, spec, terms_of_x_hat=None) -> None:
    truth = affine(*double(x_hat, weight, bias), spec, torch.float64, torch.float64)
    terms = without_signs(x_hat if terms_of_x_hat is None else terms_of_x_hat, weight, bias)
    assert_as_good(ours, reference, truth, affine(*terms, spec, torch.float64, torch.float64))


def check_backward(dy, x_hat, rstd, weight, spec, needs, x_dtype) -> None:
    ours = launch_backward(dy, x_hat, rstd, weight, spec.in_dtype(x_dtype), needs)
    reference = list(norm_backward(dy, x_hat, rstd, weight, spec, needs))
    truth = norm_backward(*double(dy, x_hat, rstd, weight), spec, needs)
    if needs[0]:
        assert ours[0].dtype == x_dtype
        reference[0] = reference[0].to(x_dtype)
    terms = [None, None, None]
    if needs[0]:
        dy, x_hat, rstd, weight = without_signs(dy, x_hat, rstd, weight)
        g = dy if weight is None else dy * (weight + spec.offset)
        mean_g = g.mean(-1, keepdim=True) if spec.kind == "layer" else 0
        terms[0] = rstd * (g + x_hat * (g * x_hat).mean(-1, keepdim=True) + mean_g)
    for candidates in zip(ours, reference, truth, terms, strict=True):
        assert_as_good(*candidates)


def check(family, cast, dtype, rows: int, hidden: int, shift: float = 0.5) -> None:
    weight, bias, spec = parameters(family, hidden, dtype, cast)
    x = draw(rows, hidden, dtype=dtype, scale=2, shift=shift)
    x_hat, rstd = check_forward(x, weight, bias, spec, dtype, dtype)
    if weight is not None:
        recomputed = launch_affine(x_hat, weight, bias, spec.in_dtype(dtype))
        check_affine(recomputed, affine(x_hat, weight, bias, spec, dtype, dtype), x_hat, weight, bias, spec)
    needs = (True, weight is not None, bias is not None)
    check_backward(draw(rows, hidden, dtype=dtype, seed=3), x_hat, rstd, weight, spec, needs, dtype)


@pytest.fixture
def short_tiles() -> Iterator[None]:
    """Tiles of 4 x 32, so that rows of 33 elements are long."""
    with ExitStack() as stack:
        for kernel in ("norm_forward", "norm_affine", "norm_backward"):
            stack.enter_context(override(kernel, LaunchConfig(rows=4, block=32, num_warps=1)))
        yield


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("family", "cast"),
    [(f, cast) for f, cast in itertools.product(FAMILIES, ["before", "after"]) if f[2] or cast == "after"],
    ids=str,
)
def test_every_family_is_as_exact_as_the_reference(family, cast, dtype, red_zones):
    check(family, cast, dtype, rows=7, hidden=129)


@pytest.mark.parametrize(
    ("family", "dtype", "hidden"),
    [
        *((RMS, torch.float32, hidden) for hidden in (1, 3, 64, 768, 4096, 8193, 16387)),
        *((LAYER, torch.bfloat16, hidden) for hidden in (1, 3, 64, 768, 4096, 8193, 16384)),
    ],
    ids=str,
)
def test_any_hidden_size(family, dtype, hidden, red_zones):
    check(family, "after", dtype, rows=3 if hidden < 1000 else 2, hidden=hidden)


@pytest.mark.parametrize("rows", [1, 2, 131])
@pytest.mark.parametrize("family", [RMS, LAYER], ids=str)
def test_any_number_of_rows(family, rows, red_zones):
    check(family, "after", torch.float32, rows=rows, hidden=96)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES, ids=str)
@pytest.mark.usefixtures("short_tiles")
def test_every_family_in_rows_longer_than_the_tile(family, dtype, red_zones):
    check(family, "before", dtype, rows=5, hidden=75)


@pytest.mark.parametrize("hidden", [64, 32, 33])
@pytest.mark.usefixtures("short_tiles")
def test_rows_that_fill_their_tiles_and_rows_that_just_do_not(hidden, red_zones):
    check(LAYER, "after", torch.float32, rows=5, hidden=hidden)


@pytest.mark.parametrize("multiprocessors", [1, 1000])
@pytest.mark.parametrize("hidden", [24, 40])
@pytest.mark.usefixtures("short_tiles")
def test_sums_over_rows_do_not_depend_on_how_many_programs_share_them(hidden, multiprocessors, monkeypatch, red_zones):
    monkeypatch.setattr(norm_backward_triton, "_multiprocessors", lambda _: multiprocessors)
    monkeypatch.setattr(norm_backward_triton, "_WARPS", 2)
    check(LAYER, "after", torch.float32, rows=21, hidden=hidden)


@pytest.mark.parametrize("hidden", [24, 100])
@pytest.mark.usefixtures("short_tiles")
def test_a_large_mean_does_not_cancel(hidden):
    check(LAYER, "after", torch.float32, rows=8, hidden=hidden, shift=1000.0)


@pytest.mark.parametrize("hidden", [24, 100])
@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3))[1:], ids=str)
@pytest.mark.usefixtures("short_tiles")
def test_only_the_gradients_that_are_needed_are_made(needs, hidden, red_zones):
    weight, _, spec = parameters(LAYER, hidden, torch.float32)
    x_hat, rstd = draw(9, hidden, dtype=torch.float32), draw(9, 1, dtype=torch.float32).abs()
    check_backward(draw(9, hidden, dtype=torch.float32, seed=3), x_hat, rstd, weight, spec, needs, torch.float32)


@pytest.mark.parametrize(
    ("x_dtype", "weight_dtype", "dtype"),
    [
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.float32, torch.float32, torch.float16),
        (torch.bfloat16, torch.float16, torch.bfloat16),
        (torch.float16, torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16, torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("cast", ["before", "after"])
@pytest.mark.parametrize("offset", [0, 1])
def test_steps_are_rounded_in_the_order_and_to_the_dtypes_of_the_reference(x_dtype, weight_dtype, dtype, cast, offset):
    weight, _, spec = parameters(("rms", offset, True, False), 200, weight_dtype, cast)
    x_hat = draw(9, 200, dtype=dtype)
    ours = launch_affine(x_hat, weight, None, NormArguments(spec, x_dtype, dtype, x_hat.dtype))
    assert torch.equal(ours, affine(x_hat, weight, None, spec, x_dtype, dtype))
    if cast == "before" and torch.promote_types(x_dtype, weight_dtype) != torch.float32:
        # In fp32 the product and the sum may be one operation, which rounds once less.
        bias = draw(200, dtype=weight_dtype, seed=5)
        ours = launch_affine(x_hat, weight, bias, NormArguments(spec, x_dtype, dtype, x_hat.dtype))
        assert torch.equal(ours, affine(x_hat, weight, bias, spec, x_dtype, dtype))


@pytest.mark.parametrize("cast", ["before", "after"])
@pytest.mark.parametrize("family", [RMS, LAYER], ids=str)
def test_parameters_and_results_may_differ_in_dtype_from_the_input(family, cast, red_zones):
    weight, bias, spec = parameters(family, 129, torch.float32, cast)
    x = draw(5, 129, dtype=torch.bfloat16)
    x_hat, rstd = check_forward(x, weight, bias, spec, torch.float32, torch.bfloat16)
    dy = draw(5, 129, dtype=torch.float32, seed=3)
    check_backward(dy, x_hat, rstd, weight, spec, (True, True, bias is not None), torch.bfloat16)


def fused(dtype: torch.dtype) -> Tensor:
    return draw(2, 4, 3, 2, 24, dtype=dtype)


LAYOUTS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "the keys of a fused projection": lambda dtype: fused(dtype)[:, :, 1],
    "transposed heads": lambda dtype: fused(dtype)[:, :, 0].transpose(1, 2),
    "a slice of the columns": lambda dtype: fused(dtype)[..., 3:20],
    "four leading dimensions that do not merge": lambda dtype: fused(dtype).permute(3, 2, 1, 0, 4)[:, :, :3],
    "rows whose elements are not adjacent": lambda dtype: fused(dtype)[0, :2, 0].transpose(-1, -2),
    "every second column": lambda dtype: fused(dtype)[..., ::2],
    "expanded rows": lambda dtype: fused(dtype)[0, 0, 0, :1].expand(3, 4, 24),
    "one element expanded": lambda dtype: fused(dtype)[0, 0, 0, 0, 0].expand(3, 4, 24),
    "one column": lambda dtype: fused(dtype)[..., :1],
    "one row": lambda dtype: fused(dtype)[0, 0, 0, 0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", [RMS, LAYER], ids=str)
def test_strided_inputs_give_what_contiguous_ones_give(family, layout, red_zones):
    x = red_zones.guard(LAYOUTS[layout](torch.float16))
    weight, bias, spec = parameters(family, x.size(-1), torch.float16)
    strided = launch_forward(x, weight, bias, spec.in_dtype(x.dtype))
    packed = launch_forward(x.contiguous(), weight, bias, spec.in_dtype(x.dtype))
    expected = torch.empty_like(x).stride() if spec.kind == "rms" else packed[0].stride()
    for ours, theirs in zip(strided, packed, strict=True):
        assert torch.equal(ours, theirs)
    assert strided[0].stride() == strided[1].stride() == expected
    recomputed = launch_affine(strided[1], weight, bias, spec.in_dtype(x.dtype))
    assert torch.equal(recomputed, launch_affine(packed[1], weight, bias, spec.in_dtype(x.dtype)))
    assert recomputed.stride() == expected
    dy = draw(*x.shape, dtype=torch.float16, seed=3)
    gradients = launch_backward(dy, strided[1], strided[2], weight, spec.in_dtype(x.dtype), ALL)
    for ours, theirs in zip(
        gradients, launch_backward(dy, *packed[1:], weight, spec.in_dtype(x.dtype), ALL), strict=True
    ):
        assert torch.equal(ours, theirs)
    assert gradients[0].stride() == expected


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block", [16, 32])
def test_gradients_may_be_expanded_or_transposed(layout, block, red_zones):
    dy = red_zones.guard(LAYOUTS[layout](torch.float32))
    weight, _, spec = parameters(LAYER, dy.size(-1), torch.float32)
    x_hat, rstd = draw(*dy.shape, dtype=torch.float32), draw(*dy.shape[:-1], 1, dtype=torch.float32).abs()
    with override("norm_backward", LaunchConfig(rows=16, block=block, num_warps=1)):
        strided = launch_backward(dy, x_hat, rstd, weight, spec.in_dtype(dy.dtype), ALL)
        packed = launch_backward(dy.contiguous(), x_hat, rstd, weight, spec.in_dtype(dy.dtype), ALL)
    for ours, theirs in zip(strided, packed, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("hidden", [24, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", [RMS, LAYER, ("layer", 0, False, False)], ids=str)
@pytest.mark.usefixtures("short_tiles")
def test_the_norm_of_a_sum_is_bitwise_that_of_the_rounded_sum(family, dtype, hidden, red_zones):
    weight, bias, spec = parameters(family, hidden, dtype)
    a, b = draw(9, hidden, dtype=dtype), draw(9, hidden, dtype=dtype, scale=3, seed=7)
    ours = launch_forward(a, weight, bias, spec.in_dtype(dtype), b)
    theirs = launch_forward(a + b, weight, bias, spec.in_dtype(dtype))
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("strided", [0, 1])
@pytest.mark.parametrize(("family", "block"), [(RMS, 16), (LAYER, 32)], ids=str)
def test_either_term_of_a_sum_may_be_strided(family, block, strided, layout, red_zones):
    terms = [red_zones.guard(LAYOUTS[layout](torch.float16))]
    terms.insert(1 - strided, draw(*terms[0].shape, dtype=torch.float16, seed=7))
    weight, bias, spec = parameters(family, terms[0].size(-1), torch.float16)
    a, b = terms
    with override("norm_forward", LaunchConfig(rows=4, block=block, num_warps=1)):
        ours = launch_forward(a, weight, bias, spec.in_dtype(a.dtype), b)
        packed = launch_forward(a.contiguous(), weight, bias, spec.in_dtype(a.dtype), b.contiguous())
    for one, other in zip(ours, packed, strict=True):
        assert torch.equal(one, other)
    assert ours[0].stride() == (torch.empty_like(a).stride() if spec.kind == "rms" else packed[0].stride())


@pytest.mark.parametrize("hidden", [24, 100])
@pytest.mark.parametrize("family", [RMS, LAYER], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.usefixtures("short_tiles")
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_nan_and_infinity_stay_visible_and_in_their_row(family, hidden, value):
    weight, bias, spec = parameters(family, hidden, torch.float32)
    x = draw(6, hidden, dtype=torch.float32)
    x[2, 5] = value
    y, x_hat, rstd = launch_forward(x, weight, bias, spec.in_dtype(x.dtype))
    assert torch.equal(y.isnan(), affine(normalize(x, spec)[0], weight, bias, spec, x.dtype, x.dtype).isnan())
    dy = draw(6, hidden, dtype=torch.float32, seed=3)
    dx, _, _ = launch_backward(dy, x_hat, rstd, weight, spec.in_dtype(x.dtype), ALL)
    assert torch.equal(dx.isnan(), norm_backward(dy, x_hat, rstd, weight, spec, ALL)[0].isnan())
    clean = [0, 1, 3, 4, 5]
    assert y[2].isnan().any()
    assert dx[2].isnan().any()
    assert y[clean].isfinite().all()
    assert dx[clean].isfinite().all()


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 8)], ids=str)
@pytest.mark.parametrize("family", [RMS, LAYER], ids=str)
def test_empty_tensors_need_no_launch(family, shape):
    weight, bias, spec = parameters(family, shape[-1], torch.bfloat16)
    x = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
    y, x_hat, rstd = launch_forward(x, weight, bias, spec.in_dtype(x.dtype))
    assert y.shape == x_hat.shape == launch_affine(x_hat, weight, bias, spec.in_dtype(x.dtype)).shape == shape
    assert rstd.shape == (*shape[:-1], 1)
    dx, dweight, dbias = launch_backward(x, x_hat, rstd, weight, spec.in_dtype(x.dtype), ALL)
    assert dx.shape == shape
    assert torch.equal(dweight, torch.zeros(shape[-1], device=DEVICE))
    assert torch.equal(dbias, torch.zeros(shape[-1], device=DEVICE))


@pytest.mark.parametrize("hidden", [24, 40])
@pytest.mark.usefixtures("short_tiles")
def test_offsets_beyond_2_to_the_31_elements(hidden):
    rows, stride = 3, 2**30 + 64
    weight, bias, spec = parameters(LAYER, hidden, torch.bfloat16)
    small = draw(rows, hidden, dtype=torch.bfloat16)
    # What an offset of 32 bits would reach lies in front, inside of the storage.
    x = lazily_huge((2 + rows, hidden), (stride, 1), torch.bfloat16, DEVICE)[2:]
    x.copy_(small)
    for ours, theirs in zip(
        launch_forward(x, weight, bias, spec.in_dtype(x.dtype)),
        launch_forward(small, weight, bias, spec.in_dtype(x.dtype)),
        strict=True,
    ):
        assert torch.equal(ours, theirs)
    rstd, other = torch.ones(rows, 1, device=DEVICE), draw(rows, hidden, dtype=torch.bfloat16, seed=3)
    for ours, theirs in zip(
        launch_backward(x, other, rstd, weight, spec.in_dtype(x.dtype), ALL),
        launch_backward(small, other, rstd, weight, spec.in_dtype(x.dtype), ALL),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("hidden", [24, 40])
@pytest.mark.usefixtures("short_tiles")
def test_a_residual_beyond_2_to_the_31_elements(hidden):
    rows, stride = 3, 2**30 + 64
    weight, bias, spec = parameters(LAYER, hidden, torch.bfloat16)
    x, small = (draw(rows, hidden, dtype=torch.bfloat16, seed=seed) for seed in (0, 7))
    residual = lazily_huge((2 + rows, hidden), (stride, 1), torch.bfloat16, DEVICE)[2:]
    residual.copy_(small)
    for ours, theirs in zip(
        launch_forward(x, weight, bias, spec.in_dtype(x.dtype), residual),
        launch_forward(x, weight, bias, spec.in_dtype(x.dtype), small),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


def test_results_beyond_2_to_the_31_elements():
    """The launchers make dense results, so the kernels are called with strides that no test could fill."""
    rows, hidden, stride = 3, 24, 2**30 + 64
    weight, bias, spec = parameters(LAYER, hidden, torch.bfloat16)
    x, dy = (draw(rows, hidden, dtype=torch.bfloat16, seed=seed) for seed in (0, 3))
    huge = lazily_huge((4, 2 + rows, hidden), (hidden, stride, 1), torch.bfloat16, DEVICE)[:, 2:]
    y, x_hat, dx, untouched = huge.zero_()
    rstd = torch.empty(rows, 1, device=DEVICE)
    packed, spread = (1, 1, hidden, 0, 0), (1, 1, stride, 0, 0)
    rounding = dict.fromkeys(("X_HAT", "SCALE", "PRODUCT", "SUM"), tl.float32)
    expected = launch_forward(x, weight, bias, spec.in_dtype(x.dtype))
    expected_dx, _, _ = launch_backward(dy, expected[1], expected[2], weight, spec.in_dtype(x.dtype), ALL)
    forward = (x, None, weight, bias, y, x_hat, rstd, rows, hidden, spec.eps, *packed, *packed, *spread, False, False)
    backward = (dy, x_hat, rstd, weight, dx)

    def check_and_clear(*results: tuple[Tensor, Tensor]) -> None:
        for ours, theirs in results:
            assert torch.allclose(ours, theirs, rtol=2**-7)
            ours.zero_()

    norm_triton.norm_forward_kernel[(1,)](*forward, **rounding, ROWS=4, BLOCK=32)
    check_and_clear((y, expected[0]), (x_hat, expected[1]))
    norm_triton.norm_long_forward_kernel[(rows,)](*forward, **rounding, BLOCK=16)
    check_and_clear((y, expected[0]))
    norm_triton.norm_affine_kernel[(1, 1)](
        x_hat, weight, bias, y, rows, hidden, *spread, *spread, False, **rounding, ROWS=4, BLOCK=32
    )
    check_and_clear((y, launch_affine(expected[1], weight, bias, spec.in_dtype(x.dtype))))
    norm_backward_triton.norm_backward_kernel[(1,)](
        *backward, None, None, rows, hidden, 1, *packed, *spread, False, False, ROWS=4, BLOCK=32
    )
    check_and_clear((dx, expected_dx))
    norm_backward_triton.norm_long_dx_kernel[(rows,)](*backward, hidden, *packed, *spread, False, False, BLOCK=16)
    check_and_clear((dx, expected_dx))
    assert not untouched.any()


def test_the_same_inputs_give_the_same_bits():
    weight, _, spec = parameters(LAYER, 256, torch.bfloat16)
    x_hat, rstd = draw(301, 256, dtype=torch.bfloat16), draw(301, 1, dtype=torch.float32).abs()
    dy = draw(301, 256, dtype=torch.bfloat16, seed=3)
    first, second = (launch_backward(dy, x_hat, rstd, weight, spec.in_dtype(dy.dtype), ALL) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def test_a_zero_weight_still_gets_a_gradient():
    _, _, spec = parameters(RMS, 96, torch.bfloat16)
    x_hat, rstd = draw(32, 96, dtype=torch.bfloat16), torch.ones(32, 1, device=DEVICE)
    dy = draw(32, 96, dtype=torch.bfloat16, seed=3)
    weight = torch.zeros(96, dtype=torch.bfloat16, device=DEVICE)
    dx, dweight, _ = launch_backward(dy, x_hat, rstd, weight, spec.in_dtype(dy.dtype), (True, True, False))
    assert (dweight != 0).all()
    assert not dx.any()
    y, _, _ = launch_forward(x_hat, weight, None, spec.in_dtype(dy.dtype))
    assert not y.any()


# --- the public function and the operators, which must take the kernels ---------------------------------------------


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The launchers that ran."""
    ran: list[str] = []

    def recorded(launcher: Callable[..., object]) -> Callable[..., object]:
        def launch(*args: object) -> object:
            ran.append(launcher.__name__)
            return launcher(*args)

        return launch

    for launcher in (launch_forward, launch_affine, launch_backward):
        monkeypatch.setattr(norm_triton, launcher.__name__, recorded(launcher))
    return ran


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_the_public_function_is_as_exact_as_autograd(family, dtype, launches):
    weight, bias, spec = parameters(family, 72, dtype, "before")
    x = draw(64, 72, dtype=dtype, scale=2, shift=0.5)
    dy = draw(64, 72, dtype=dtype, seed=3)

    def plain(*tensors: Tensor | None) -> Tensor:
        return affine(normalize(tensors[0], spec)[0], *tensors[1:], spec, tensors[0].dtype, tensors[0].dtype)

    def run(function, *tensors):
        leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
        y = function(*leaves)
        return [y.detach(), *torch.autograd.grad(y, [leaf for leaf in leaves if leaf is not None], dy.to(y.dtype))]

    truth = run(plain, *double(x, weight, bias))
    stock = run(plain, x, weight, bias)
    ours = run(lambda *t: ms_norm(*t, spec, dtype), x, weight, bias)
    assert launches == ["launch_forward", "launch_backward"]
    for exact, reference, candidate in zip(truth, stock, ours, strict=True):
        error = (candidate.double() - exact).square().mean().sqrt()
        # x_hat is rounded once before backward reads it: one rounding beside those that the reference makes.
        rounding = torch.finfo(dtype).eps / 2 * exact.square().mean().sqrt()
        assert error <= 1.25 * (reference.double() - exact).square().mean().sqrt() + rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", [LAYER, ("rms", 0, False, False)], ids=str)
def test_the_norm_of_a_sum_takes_one_kernel_each_way_and_no_addition(family, dtype, launches):
    weight, bias, spec = parameters(family, 72, dtype)
    a, b = (draw(16, 72, dtype=dtype, seed=seed).requires_grad_() for seed in (0, 7))
    dy = draw(16, 72, dtype=dtype, seed=3)
    with torch.profiler.profile() as profile:
        y = ms_norm_of_sum(a, b, weight, bias, spec, dtype)
    assert not [event.key for event in profile.key_averages() if event.key.startswith("aten::add")]
    given = torch.autograd.grad(y, [a, b], dy)
    assert launches == ["launch_forward", "launch_backward"]
    total = (a + b).detach().requires_grad_()
    expected = ms_norm(total, weight, bias, spec, dtype)
    assert torch.equal(y, expected)
    (dx,) = torch.autograd.grad(expected, total, dy)
    assert torch.equal(given[0], dx)
    assert torch.equal(given[1], dx)


def test_the_output_is_made_again_by_the_kernel(launches):
    weight, bias, spec = parameters(LAYER, 72, torch.bfloat16, "before")
    x, other = draw(4, 72, dtype=torch.bfloat16).requires_grad_(), draw(4, 72, dtype=torch.bfloat16)
    other.requires_grad_()
    with RecomputeScope():
        y = ms_norm(x, weight, bias, spec, x.dtype)
        z = y * other
    (given,) = torch.autograd.grad(z.sum(), other)
    assert launches == ["launch_forward", "launch_affine"]
    assert torch.equal(given, y.detach())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_an_eps_it_is_the_machine_epsilon_of_fp32(dtype):
    x = draw(4, 24, dtype=dtype, scale=1e-4)
    _, x_hat, _ = launch_forward(x, None, None, NormSpec("rms", None).in_dtype(dtype))
    expected = torch.nn.functional.rms_norm(x, (24,))
    assert (x_hat.double() - expected.double()).norm() <= 2 * torch.finfo(dtype).eps * expected.double().norm()


@pytest.mark.parametrize("family", [RMS, LAYER, ("rms", 0, False, False)], ids=str)
def test_the_operators_are_consistent_with_their_fakes(family, launches):
    weight, bias, spec = parameters(family, 24, torch.float32)
    weight = None if weight is None else weight.requires_grad_()
    for x in (fused(torch.float32)[0].transpose(0, 1), draw(24, 5, dtype=torch.float32).t()):
        x.requires_grad_()
        checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
        if weight is None:
            arguments = (x, spec.kind, spec.eps, x.dtype)
            torch.library.opcheck(norm_ops.ms_normalize, arguments, test_utils=checks)
        else:
            arguments = (x, weight, bias, spec.kind, spec.eps, spec.offset, spec.cast, x.dtype, x.dtype)
            torch.library.opcheck(norm_ops.ms_norm, arguments, test_utils=checks)
            residual = torch.randn(x.shape, device=DEVICE).requires_grad_()
            torch.library.opcheck(norm_ops.ms_norm, (*arguments, residual), test_utils=checks)
    assert {"launch_forward", "launch_backward"} <= set(launches)


def test_what_the_kernels_do_not_take_goes_to_the_reference(launches):
    x = draw(4, 24, dtype=torch.float64)
    assert not runs_triton(x)
    ms_norm(x, None, None, NormSpec("rms", 1e-5), x.dtype)
    assert launches == []
