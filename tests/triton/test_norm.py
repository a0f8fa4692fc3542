"""The norms' Triton kernels: errors no larger than the PyTorch reference's, whatever the size, dtype and value."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from memopt.kernels.norm import backward_triton as norm_backward_triton
from memopt.kernels.norm.forward_triton import launch_affine, launch_backward, launch_forward
from memopt.kernels.norm.function import (
    NormArguments,
    affine,
    norm_backward,
    normalize,
)
from tests.kernels.norm.test_norm import FAMILIES
from tests.triton.conftest import DEVICE
from tests.triton.norms import (
    ALL,
    DTYPES,
    LAYER,
    RMS,
    check,
    check_backward,
    check_forward,
    draw,
    parameters,
)


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
        *((LAYER, torch.bfloat16, hidden) for hidden in (1, 3, 64, 768, 4096, 4097, 8193, 8200, 16384)),
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


@pytest.mark.parametrize("needs", [ALL, (False, True, True)], ids=str)
@pytest.mark.parametrize(
    ("two_sums", "hidden", "launched"),
    [
        (128, 32, ["dx dweight dbias"]),
        (64, 32, ["dx dweight", "dbias"]),
        (128, 31, ["dx dweight", "dbias"]),
        (64, 31, ["dx", "dweight dbias"]),
    ],
)
@pytest.mark.usefixtures("short_tiles")
def test_two_sums_that_registers_do_not_hold_are_made_one_after_the_other(
    two_sums, hidden, launched, needs, monkeypatch, red_zones
):
    """Tiles of 4 x 32; rows of 31 are not whole vectors, which takes twice the registers."""
    made: list[str] = []

    class Recorded:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            def launch(*args, **options):
                results = zip(("dx", "dweight", "dbias"), args[4:7], strict=True)
                made.append(" ".join(name for name, result in results if isinstance(result, torch.Tensor)))
                self.kernel[grid](*args, **options)

            return launch

    for name in ("norm_backward_kernel", "norm_long_dx_kernel"):
        monkeypatch.setattr(norm_backward_triton, name, Recorded(getattr(norm_backward_triton, name)))
    monkeypatch.setattr(norm_backward_triton, "_TWO_SUMS", two_sums)
    weight, _, spec = parameters(LAYER, hidden, torch.float32)
    x_hat, rstd = draw(9, hidden, dtype=torch.float32), draw(9, 1, dtype=torch.float32).abs()
    check_backward(draw(9, hidden, dtype=torch.float32, seed=3), x_hat, rstd, weight, spec, needs, torch.float32)
    assert made == (launched if needs[0] else [rest for each in launched if (rest := each.replace("dx", "").strip())])


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


@pytest.mark.parametrize("hidden", [96, 20000], ids=["rows at once", "long rows"])
@pytest.mark.parametrize("family", [RMS, LAYER, ("layer", 0, False, True)], ids=["weight", "both", "bias"])
def test_the_forward_copies_the_affine_and_writes_nothing_behind_it(family, hidden):
    weight, bias, spec = parameters(family, hidden, torch.bfloat16)
    given = [each for each in (weight, bias) if each is not None]
    room = torch.zeros(len(given) * hidden + 64, dtype=torch.bfloat16, device=DEVICE)
    copies = room[: len(given) * hidden]
    x = draw(5, hidden, dtype=torch.bfloat16)
    copied = launch_forward(x, weight, bias, spec.in_dtype(x.dtype), None, copies)
    assert torch.equal(room, torch.cat([*given, torch.zeros_like(room[:64])]))
    for ours, plain in zip(copied, launch_forward(x, weight, bias, spec.in_dtype(x.dtype)), strict=True):
        assert torch.equal(ours, plain)


@pytest.mark.parametrize(("rows", "hidden"), [(301, 96), (9, 10000)], ids=["rows at once", "long rows"])
def test_gradients_of_the_affine_are_rounded_once_to_the_dtype_that_is_asked_for(rows, hidden, monkeypatch):
    monkeypatch.setattr(
        norm_backward_triton, "_multiprocessors", lambda device: 70
    )  # more programs than a tile has rows
    weight, _, spec = parameters(LAYER, hidden, torch.bfloat16)
    x_hat, dy = (draw(rows, hidden, dtype=torch.bfloat16, seed=seed) for seed in (0, 3))
    rstd = draw(rows, 1, dtype=torch.float32).abs()
    arguments = spec.in_dtype(dy.dtype)
    _, *wide = launch_backward(dy, x_hat, rstd, weight, arguments, ALL)
    _, *narrow = launch_backward(dy, x_hat, rstd, weight, arguments, ALL, torch.bfloat16)
    for ours, exact, truth in zip(
        narrow, wide, ((dy.double() * x_hat.double()).sum(0), dy.double().sum(0)), strict=True
    ):
        assert ours.dtype == torch.bfloat16
        assert exact.dtype == torch.float32
        assert torch.equal(ours, exact.bfloat16())
        # Each row is added in fp32 once in a program and once with the other programs' sums.
        terms = (dy.double() * (x_hat.double() if exact is wide[0] else 1)).abs().sum(0)
        assert ((exact.double() - truth).abs() <= (rows + 1) * torch.finfo(torch.float32).eps * terms).all()
