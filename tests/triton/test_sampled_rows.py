"""The kernels of sampled rows: as accurate as PyTorch, in every size and layout, to the last element and no further."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from memopt.kernels.sampled_linear import function
from memopt.kernels.sampled_linear import rows_triton as room
from memopt.kernels.sampled_linear.function import (
    _row_norms,
    _weight_gradient,
    gather_rows,
    row_norms,
    sampled_weight_gradient,
)
from memopt.kernels.sampled_linear.rows_triton import launch_gather_rows, launch_row_norms, launch_weight_gradient
from tests.triton.accuracy import assert_as_accurate, assert_same_special_values
from tests.triton.conftest import DEVICE
from tests.triton.memory import RedZones, lazily_huge

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (3, 7), (2, 1024), (4, 1024), (5, 1000), (64, 32), (65, 33), (3, 1025), (2, 5000), (1, 2048)]

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy: overflow, inf - inf
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def some_rows(n: int, k: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(n, (k,), generator=generator, dtype=torch.int32)
    return rows.to(DEVICE), (torch.rand(k, generator=generator) * 3).to(DEVICE)


def check_norms(x: Tensor) -> None:
    norms = launch_row_norms(x)
    truth = x.double().square().sum(1).sqrt()
    assert_as_accurate(norms, torch.linalg.vector_norm(x, dim=1, dtype=torch.float32), truth)


def check_gradient(dy: Tensor, kept: Tensor, rows: Tensor, weights: Tensor) -> None:
    made = launch_weight_gradient(dy, kept, rows, weights)
    truth = (dy[rows.long()].double() * weights.double()[:, None]).t() @ kept.double()
    assert_as_accurate(made, _weight_gradient(dy, kept, rows, weights), truth)


@every_dtype
@every_shape
def test_norms_and_kept_rows_of_every_size(shape: tuple[int, int], dtype: torch.dtype, red_zones: RedZones) -> None:
    x = red_zones.guard(draw(*shape, dtype=dtype))
    check_norms(x)
    for k in (1, shape[0], 2 * shape[0] + 1):
        rows, _ = some_rows(shape[0], k)
        kept = launch_gather_rows(x, red_zones.guard(rows))
        assert kept.dtype == dtype
        assert torch.equal(kept, x[rows.long()])


@every_dtype
@pytest.mark.parametrize(
    ("k", "outs", "ins"),
    [(1, 1, 1), (31, 3, 5), (32, 64, 64), (33, 64, 128), (64, 65, 63), (100, 130, 20), (7, 20, 130)],
)
@pytest.mark.parametrize("full", [1, 2**30], ids=["large tiles", "small tiles"])
def test_gradients_of_every_size(
    full: int, k: int, outs: int, ins: int, dtype: torch.dtype, red_zones: RedZones, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "_FULL", full)
    dy, kept, (rows, weights) = draw(50, outs, dtype=dtype), draw(k, ins, dtype=dtype, seed=1), some_rows(50, k)
    check_gradient(*map(red_zones.guard, (dy, kept, rows, weights)))


def test_many_tiles_are_all_visited_whatever_their_order() -> None:
    dy, kept, (rows, weights) = draw(40, 700), draw(20, 300, seed=1), some_rows(40, 20)
    check_gradient(dy, kept, rows, weights)
    check_gradient(kept, dy[:20], rows % 20, weights)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "sliced rows": lambda t: torch.cat((t, t), 1)[:, : t.size(1)],
    "every other row": lambda t: torch.stack((t, t), 1)[:, 0],
    "transposed": lambda t: t.t().contiguous().t(),
    "shifted": lambda t: torch.cat((t.new_zeros(1), t.reshape(-1)))[1:].view_as(t),
    "one row for all": lambda t: t[:1].expand_as(t),
    "one number for all": lambda t: t[:1, :1].expand_as(t),
}


@every_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_read_in_place(layout: str, dtype: torch.dtype, red_zones: RedZones) -> None:
    x, dy = (red_zones.guard(LAYOUTS[layout](draw(48, 64, dtype=dtype, seed=seed))) for seed in (0, 1))
    rows, weights = some_rows(48, 48)
    check_norms(x)
    assert torch.equal(launch_gather_rows(x, rows), x[rows.long()])
    expected = launch_weight_gradient(dy.contiguous(), x.contiguous(), rows, weights)
    every_other = torch.stack((rows, rows), 1)[:, 0], torch.stack((weights, weights), 1)[:, 0]
    # Sums of 48 numbers in fp32, perhaps in another order, and one rounding of the result.
    sizes = (dy[rows.long()].double() * weights[:, None]).abs().t() @ x.double().abs()
    allowed = {"rtol": torch.finfo(dtype).eps, "atol": 48 * 2.0**-24 * float(sizes.max())}
    for made in (launch_weight_gradient(dy, x, rows, weights), launch_weight_gradient(dy, x, *every_other)):
        torch.testing.assert_close(made, expected, **allowed)


@pytest.mark.parametrize("hidden", [5, 1024, 3000])
@pytest.mark.parametrize("exponent", [-149, -133, -126, -100, -80, -51, -50, -49, 0, 49, 50, 51, 80, 100, 120])
def test_norms_of_every_magnitude_are_kept(exponent: int, hidden: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = draw(4, hidden, dtype=torch.float64).mul(2.0**exponent).to(dtype)
        x[1, ::2] = 0
        x[2, 1:] *= 2.0**-60
        x[3, 0] = 2.0 ** min(exponent + 60, 120)
        truth = x.double().square().sum(1).sqrt()
        error = (launch_row_norms(x).double() - truth).abs()
        # The sum of n squares in fp32 in halves, the root, and numbers below the normal ones.
        allowed = (math.log2(hidden) + hidden / 1024 + 4) * 2.0**-24 * truth + 2.0**-149
        assert (error <= allowed).all(), (error / truth).tolist()


@every_dtype
def test_special_values_are_those_of_the_reference(dtype: torch.dtype) -> None:
    x = draw(8, 1500, dtype=dtype)
    x[0, 3], x[1, 1400], x[2, 7], x[3] = math.nan, math.inf, -math.inf, 0.0
    x[4, 0], x[4, 1], x[5] = math.inf, math.nan, torch.finfo(dtype).max
    assert_same_special_values(launch_row_norms(x), _row_norms(x))
    assert launch_row_norms(x)[3] == 0
    rows, weights = torch.arange(8, dtype=torch.int32, device=DEVICE), torch.ones(8, device=DEVICE)
    weights[6] = math.nan
    for count in (1, 3, 4, 7):
        dy, kept, few = draw(8, 20, dtype=dtype), draw(count, 30, dtype=dtype), rows[-count:].contiguous()
        made = launch_weight_gradient(dy, kept, few, weights[few.long()])
        assert made.isnan().all() == (count > 1)


def test_weights_are_applied_in_fp32_and_rounded_once() -> None:
    # In bf16 the weight would be 1 and the product 1.5.
    dy, kept = (torch.full((1, 1), size, dtype=torch.bfloat16, device=DEVICE) for size in (1.5, 1.0))
    weights = torch.tensor([1 + 0.45 * 2**-7], device=DEVICE)
    made = launch_weight_gradient(dy, kept, torch.zeros(1, dtype=torch.int32, device=DEVICE), weights)
    assert float(made) == 1.5 + 2**-7


def test_slots_behind_the_last_add_nothing_even_where_row_0_is_not_finite() -> None:
    dy, kept = draw(8, 64), draw(5, 64)
    dy[0] = math.nan
    rows = torch.arange(1, 6, dtype=torch.int32, device=DEVICE)
    assert launch_weight_gradient(dy, kept, rows, torch.ones(5, device=DEVICE)).isfinite().all()


@pytest.mark.parametrize(("n", "hidden", "k"), [(0, 5, 0), (5, 0, 3), (5, 4, 0)])
def test_empty_tensors_stay_empty_and_no_rows_give_zeros(n: int, hidden: int, k: int) -> None:
    x = draw(n, hidden)
    rows, weights = torch.zeros(k, dtype=torch.int32, device=DEVICE), torch.ones(k, device=DEVICE)
    assert torch.equal(launch_row_norms(x[:, :0]), x.new_zeros(n))
    assert launch_row_norms(x).shape == (n,)
    kept = launch_gather_rows(x, rows)
    assert kept.shape == (k, hidden)
    made = launch_weight_gradient(draw(n, 3), kept, rows, weights)
    assert torch.equal(made, x.new_zeros(3, hidden))


def test_rows_beyond_two_to_the_31_elements_are_read_where_they_are() -> None:
    stride = 2**30 + 64
    dy, x = (lazily_huge((4, 8), (stride, 1), torch.bfloat16, DEVICE) for _ in range(2))
    dy.copy_(draw(4, 8, dtype=torch.bfloat16))
    x.copy_(draw(4, 8, dtype=torch.bfloat16, seed=1))
    rows, weights = torch.tensor([3, 2, 3], dtype=torch.int32, device=DEVICE), torch.ones(3, device=DEVICE)
    check_norms(x)
    assert torch.equal(launch_gather_rows(x, rows), x[rows.long()])
    check_gradient(dy, x[1:], rows, weights)


@every_dtype
def test_a_gradient_of_another_dtype_is_taken(dtype: torch.dtype) -> None:
    for other in DTYPES:
        dy, kept, (rows, weights) = draw(30, 17, dtype=other), draw(9, 21, dtype=dtype), some_rows(30, 9)
        check_gradient(dy, kept, rows, weights)


@every_dtype
def test_the_public_functions_run_the_kernels(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    launched = []
    for launch in (launch_row_norms, launch_gather_rows, launch_weight_gradient):
        name = launch.__name__

        def recorded(*args: object, launch=launch, name=name) -> object:  # type: ignore[no-untyped-def]
            launched.append(name)
            return launch(*args)

        monkeypatch.setattr(room, name, recorded)
    x, (rows, weights) = draw(30, 20, dtype=dtype), some_rows(30, 9)
    row_norms(x)
    sampled_weight_gradient(x, gather_rows(x, rows), rows, weights)
    assert launched == ["launch_row_norms", "launch_gather_rows", "launch_weight_gradient"]


def test_fp64_is_for_the_reference() -> None:
    x, (rows, weights) = draw(30, 20, dtype=torch.float64), some_rows(30, 9)
    made = sampled_weight_gradient(x, gather_rows(x, rows), rows, weights)
    assert made.dtype == row_norms(x).dtype == torch.float64


def test_a_gradient_is_computed_after_a_trainer_has_allowed_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends, "fp32_precision", "tf32")  # as TrainingArguments(tf32=True)
    dy, kept, (rows, weights) = draw(9, 5), draw(4, 3), some_rows(9, 4)
    expected = _weight_gradient(dy, kept, rows, weights)
    torch.testing.assert_close(launch_weight_gradient(dy, kept, rows, weights), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("capability", "fits"), [((7, 5), False), ((8, 0), True)])
def test_gpus_on_which_the_gradients_tiles_spill_run_the_reference(
    capability: tuple[int, int], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert function._kernel_fits.__wrapped__(torch.device("cuda", 0)) == fits
    monkeypatch.setattr(function, "_kernel_fits", lambda device: fits)
    launched = []
    monkeypatch.setattr(room, "launch_weight_gradient", lambda *arguments: launched.append(arguments))
    x, (rows, weights) = draw(9, 5), some_rows(9, 4)
    sampled_weight_gradient(x, gather_rows(x, rows), rows, weights)
    assert bool(launched) == fits
