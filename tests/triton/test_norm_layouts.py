"""The norms' Triton kernels on strided, expanded, empty and huge tensors, and on two that are added."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl
from torch import Tensor

from memopt.kernels.base.launch import LaunchConfig, override
from memopt.kernels.norm import backward_triton as norm_backward_triton
from memopt.kernels.norm import forward_triton as norm_triton
from memopt.kernels.norm.forward_triton import launch_affine, launch_backward, launch_forward
from tests.kernels.norm import test_norm_layouts as operators
from tests.triton.conftest import DEVICE
from tests.triton.memory import lazily_huge
from tests.triton.norms import (
    ALL,
    DTYPES,
    LAYER,
    LAYOUTS,
    RMS,
    draw,
    parameters,
)


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
    # What counts as changed in place would be saved by its readers, beside x_hat.
    assert all(result._version == 0 for result in strided)
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


@pytest.mark.parametrize("layout", operators.LAYOUTS)
@pytest.mark.parametrize("kind", operators.KINDS)
@pytest.mark.parametrize("dtype", operators.DTYPES, ids=str)
def test_readers_of_a_norm_save_its_one_tensor_in_every_layout(layout, kind, dtype):
    operators.check_readers_share_one_tensor(layout, kind, dtype, DEVICE)


@pytest.mark.parametrize("layout", operators.LAYOUTS)
@pytest.mark.parametrize("kind", operators.KINDS)
@pytest.mark.parametrize("summed", [False, True], ids=["", "of a sum"])
def test_values_gradients_and_strides_are_stocks_in_every_layout(layout, kind, summed):
    operators.check_as_stock(layout, kind, torch.float32, DEVICE, summed=summed, allowed=0)


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
    forward = (
        x,
        None,
        weight,
        bias,
        y,
        x_hat,
        rstd,
        None,
        rows,
        hidden,
        spec.eps,
        *packed,
        *packed,
        *spread,
        False,
        False,
    )
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
        *backward, None, None, rows, hidden, 1, *packed, *spread, False, False, False, ROWS=4, BLOCK=32, STAGES=1
    )
    check_and_clear((dx, expected_dx))
    norm_backward_triton.norm_long_dx_kernel[(rows,)](
        *backward, hidden, *packed, *spread, False, False, False, BLOCK=16
    )
    check_and_clear((dx, expected_dx))
    assert not untouched.any()
