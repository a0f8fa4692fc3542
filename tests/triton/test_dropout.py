"""The kernel of seeded dropout gives the bits of the PyTorch reference, forward and backward, wherever tensors lie."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from memopt.kernels.base.counter import uniform
from memopt.kernels.base.launch import launch_config
from memopt.kernels.dropout import function_triton as dropout_triton
from memopt.kernels.dropout.function import Mask, _dropped_out, _scale, seeded_dropout
from memopt.kernels.dropout.function_triton import launch_dropout
from tests.support.compare import same_bits
from tests.triton.conftest import DEVICE
from tests.triton.memory import RedZones, lazily_huge

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SEEDS = [0, 2**32 + 7, -4]
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "heads": lambda x: x.transpose(1, 2),
    "transposed": lambda x: x.transpose(0, 2),
    "slice": lambda x: x[:, 1:, 1:],
    "steps": lambda x: x[:, :, ::2],
    "expanded rows": lambda x: x[:, :1].expand(-1, 6, -1),
    "expanded columns": lambda x: x[..., :1].expand(-1, -1, 4),
    "half": lambda x: x.flatten(1).chunk(2, 1)[1],
    "not aligned": lambda x: x.flatten()[1:],
    "scalar": lambda x: x[0, 0, 0],
}

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy: inf * 0
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(DEVICE, dtype)


def mask(p: float, seed: int, dtype: torch.dtype, device: str = "cuda") -> Mask:
    return Mask(seed, p, _scale(p, dtype, device))


def launched(x: Tensor, m: Mask) -> Tensor:
    return launch_dropout(x, m.seed, m.threshold, m.scale)


@every_dtype
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("p", [0.0, 1 / 3, 0.999])
@pytest.mark.parametrize("rounded_as_on", ["cpu", "cuda"])
def test_bits_are_those_of_the_reference(rounded_as_on: str, p: float, seed: int, dtype: torch.dtype) -> None:
    x, m = draw(5000, dtype=dtype), mask(p, seed, dtype, rounded_as_on)
    assert same_bits(launched(x, m), _dropped_out(x, m), strides=True)


def test_an_element_whose_random_number_is_p_is_kept() -> None:
    x = draw(50).abs()
    u = uniform(torch.arange(50, device=DEVICE), 7)
    assert all(launched(x, mask(float(u[i]), 7, x.dtype))[i] != 0 for i in range(50))


@every_dtype
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_mask_goes_by_the_logical_index_wherever_elements_lie(
    layout: Callable[[Tensor], Tensor], dtype: torch.dtype, red_zones: RedZones
) -> None:
    x, m = red_zones.guard(layout(draw(6, 7, 8, dtype=dtype))), mask(0.4, 3, dtype)
    y = launched(x, m)
    assert same_bits(y, _dropped_out(x, m), strides=True)
    assert y._version == 0  # its readers would save it
    kept = (uniform(torch.arange(x.numel(), device=DEVICE), 3).double() >= 0.4).view(x.shape)
    assert torch.equal(y != 0, kept)


@every_dtype
@pytest.mark.parametrize("distance", [None, -1, 0, 1])
def test_every_size_is_covered_to_its_last_element_and_not_further(
    distance: int | None, dtype: torch.dtype, red_zones: RedZones
) -> None:
    tile = launch_config("activation_backward", 4096, dtype).block
    for count in (0, 1, 2, 127) if distance is None else (tile + distance, 2 * tile + distance):
        x, m = red_zones.guard(draw(count, dtype=dtype)), mask(0.1, 3, dtype)
        assert same_bits(launched(x, m), _dropped_out(x, m), strides=True)


@every_dtype
def test_rows_with_gaps_are_covered_to_their_last_element(dtype: torch.dtype, red_zones: RedZones) -> None:
    for count, hidden in ((3, 1), (5, 100), (2, 2048), (3, 2049), (70, 33)):
        x, m = red_zones.guard(draw(count, 2 * hidden, dtype=dtype)[:, hidden:]), mask(0.4, 3, dtype)
        assert same_bits(launched(x, m), _dropped_out(x, m), strides=True)


@every_dtype
@pytest.mark.parametrize("p", [0.1, 1.0])
def test_special_values_are_those_of_the_reference(p: float, dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    x = torch.tensor(
        [math.nan, math.inf, -math.inf, 0.0, -0.0, limits.max, limits.min, limits.tiny, limits.tiny * limits.eps] * 40,
        dtype=dtype, device=DEVICE,
    )  # fmt: skip
    m = mask(p, 1, dtype)
    y = launched(x, m)
    assert same_bits(y, _dropped_out(x, m), strides=True)
    assert bool(y[1::9].isnan().any()), "an infinity that is dropped is NaN, as in PyTorch"


@every_dtype
def test_forward_and_backward_run_the_kernel(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    launches = []

    def recorded(*arguments: object) -> Tensor:
        launches.append(arguments)
        return launch_dropout(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(dropout_triton, "launch_dropout", recorded)
    x, dy = draw(6, 7, 8, dtype=dtype).requires_grad_(), draw(7, 6, 8, dtype=dtype)
    y = seeded_dropout(x.transpose(0, 1), 0.3, 5)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert len(launches) == 2
    m = mask(0.3, 5, dtype, DEVICE)
    assert same_bits(y.detach(), _dropped_out(x.detach().transpose(0, 1), m), strides=True)
    assert torch.equal(dx, _dropped_out(dy, m).transpose(0, 1))


def test_fp64_is_for_the_reference() -> None:
    x = draw(500).double()
    assert torch.equal(seeded_dropout(x, 0.3, 1), _dropped_out(x, mask(0.3, 1, torch.float64)))


def test_rows_that_lie_more_than_two_to_the_31_elements_apart_are_read_right() -> None:
    x = lazily_huge((2, 4), (2**31 + 64, 1), torch.bfloat16, DEVICE)
    x.copy_(draw(2, 4))
    m = mask(0.5, 3, torch.bfloat16)
    assert same_bits(launched(x, m), _dropped_out(x, m), strides=True)
