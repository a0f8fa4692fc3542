"""The kernels of the codes give the bytes and gradients of the PyTorch reference, on every layout."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from memopt.kernels.derivative_codes import codes, codes_triton
from memopt.kernels.derivative_codes.codes import _apply, _encode, code_of, derivative_code
from memopt.kernels.derivative_codes.codes_triton import launch_apply, launch_encode
from memopt.kernels.derivative_codes.fit import KINDS
from memopt.kernels.derivative_codes.schemes import FLAG_GROUP, PUBLISHED, RELU_MASK, SCHEMES, DerivativeCode
from memopt.torch_compat.activations import ACTIVATIONS
from tests.triton.conftest import DEVICE
from tests.triton.memory import RedZones, lazily_huge

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CODES = [(kind, scheme) for kind in KINDS for scheme in SCHEMES if scheme != "published" or kind in PUBLISHED]
#: One of each width and family.
FEW = [("silu", "2bit"), ("silu", "3bit"), ("silu", "4bit"), ("mish", "8bit")]
few_codes = pytest.mark.parametrize(("kind", "scheme"), FEW)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy: inf - inf, overflow


def draw(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(DEVICE, dtype)


def unpacked(packed: Tensor, code: DerivativeCode, count: int) -> Tensor:
    return codes._unpack(packed[: code.code_bytes(count)], code.bits)[:count].int()


def check_encoding(z: Tensor, code: DerivativeCode) -> Tensor:
    """The packed codes, which are the reference's: to the bit for steps. The kernel has an exponential of its own, so
    a derivative that lies between two values by less than fp32 tells apart may get either."""
    count = z.numel()
    ours, reference = launch_encode(z, code), _encode(z.reshape(-1), code)
    if torch.equal(ours, reference):
        return ours
    assert not code.thresholds
    assert torch.equal(ours[code.code_bytes(count) :], reference[code.code_bytes(count) :])
    a, b = unpacked(ours, code, count), unpacked(reference, code, count)
    assert (a - b).abs().max() <= 1
    slope = ACTIVATIONS[code.kind].gradient(torch.ones_like(z, dtype=torch.float64), z.double()).reshape(-1)
    place = (slope - code.levels[0]) / code.step
    distance = (place - place.floor() - 0.5).abs()
    assert torch.minimum(distance, 1 - distance)[a != b].max() < 4e-7 / code.step
    return ours


def check_layout(z: Tensor, dh: Tensor, code: DerivativeCode) -> None:
    """What the launchers give must not depend on where the elements lie."""
    packed = launch_encode(z, code)
    assert torch.equal(packed, launch_encode(z.contiguous(), code))
    dz = launch_apply(dh, packed, code)
    assert dz.shape == dh.shape
    assert torch.equal(dz, _apply(dh.reshape(-1), packed, code).view(dh.shape))


@pytest.mark.parametrize("count", [1, 3, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize(("kind", "scheme"), CODES)
def test_bytes_and_gradients_are_those_of_the_reference(kind: str, scheme: str, count: int) -> None:
    code, dh = derivative_code(kind, scheme), draw(count, seed=1)
    packed = check_encoding(draw(count, scale=2.0), code)
    assert torch.equal(launch_apply(dh, packed, code), _apply(dh, packed, code))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 9, 1024, 2003])
def test_the_mask_of_a_relu_takes_one_bit_and_is_exact(count: int, dtype: torch.dtype) -> None:
    h, dh = draw(count, dtype=dtype).relu(), draw(count, dtype=dtype, seed=1)
    packed = check_encoding(h, RELU_MASK)
    assert packed.numel() == -(-count // 8) - (-count // FLAG_GROUP)
    assert torch.equal(launch_apply(dh, packed, RELU_MASK), torch.where(h > 0, dh, 0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@few_codes
def test_every_dtype_is_computed_in_fp32_and_rounded_once(kind: str, scheme: str, dtype: torch.dtype) -> None:
    code, dh = derivative_code(kind, scheme), draw(2003, dtype=dtype, seed=1)
    packed = check_encoding(draw(2003, dtype=dtype, scale=3.0), code)
    dz = launch_apply(dh, packed, code)
    assert dz.dtype == dtype
    assert torch.equal(dz, _apply(dh, packed, code))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_thresholds_part_the_numbers_that_they_part_in_the_reference(kind: str, dtype: torch.dtype) -> None:
    code = derivative_code(kind, "3bit")
    at = torch.tensor(code.thresholds, dtype=torch.float64).to(dtype)
    z = torch.cat([at, torch.nextafter(at, at - 1), torch.nextafter(at, at + 1)]).to(DEVICE)
    assert torch.equal(launch_encode(z, code), _encode(z, code))


@pytest.mark.parametrize("count", [0, 1, 7, 1023, 1024, 1025, 2056])
@few_codes
def test_every_size_is_written_to_its_last_byte_and_not_further(
    kind: str, scheme: str, count: int, red_zones: RedZones
) -> None:
    code = derivative_code(kind, scheme)
    z, dh = red_zones.guard(draw(count)), red_zones.guard(draw(count, seed=1))
    packed = launch_encode(z, code)
    assert packed.shape == (code.packed_bytes(count),)
    assert not packed[code.code_bytes(count) :].any()
    assert not launch_apply(dh, packed, code).isnan().any()


LAYOUTS = {
    "transposed": lambda t: t.transpose(0, 1),
    "channels last": lambda t: t.permute(2, 0, 1),
    "half of each row": lambda t: t[..., : t.size(-1) // 2],
    "some rows of each block": lambda t: t[:, 1:3, 3:],
    "every second element": lambda t: t[..., ::2],
    "one column": lambda t: t[..., 5:6],
    "expanded over rows": lambda t: t[:, :1].expand(-1, 4, -1),
    "expanded from a scalar": lambda t: t[0, 0, 0].expand(3, 4, 5),
    "a scalar": lambda t: t[0, 0, 0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@few_codes
def test_every_layout_is_read_in_logical_order(kind: str, scheme: str, layout: str, red_zones: RedZones) -> None:
    z = red_zones.guard(LAYOUTS[layout](draw(3, 30, 40, scale=2.0)))
    dh = red_zones.guard(LAYOUTS[layout](draw(3, 30, 40, seed=1)))
    check_layout(z, dh, derivative_code(kind, scheme))


def test_four_leading_dimensions_that_do_not_merge_are_copied() -> None:
    z = draw(3, 4, 5, 6, 7)[::2, ::2, ::2, ::2, :5]
    check_layout(z, draw(*z.shape, seed=1), derivative_code("silu", "3bit"))


def test_offsets_beyond_2_to_the_31_elements_are_right() -> None:
    # Neither a row's number nor the spacing exceeds 32 bits, their product does.
    z = lazily_huge((5, 64), (2**29 + 16, 1), torch.bfloat16, DEVICE)
    z.copy_(draw(5, 64, dtype=torch.bfloat16))
    check_layout(z, z, derivative_code("silu", "2bit"))


@few_codes
def test_a_nan_makes_its_group_of_gradients_nan_and_no_other(kind: str, scheme: str) -> None:
    code, z = derivative_code(kind, scheme), draw(3000)
    z[1500] = math.nan
    packed = launch_encode(z, code)
    assert packed[code.code_bytes(3000) :].tolist() == [0, 1, 0]
    dz = launch_apply(torch.ones_like(z), packed, code)
    assert dz[1024:2048].isnan().all()
    assert dz.isnan().sum() == 1024


@pytest.mark.parametrize("kind", KINDS)
def test_infinity_is_in_the_tail_of_a_step_code(kind: str) -> None:
    code = derivative_code(kind, "3bit")
    z = torch.tensor([-math.inf, math.inf], device=DEVICE)
    dz = launch_apply(torch.ones_like(z), launch_encode(z, code), code)
    assert dz.tolist() == [code.levels[0], code.levels[-1]]


@few_codes
def test_a_gradient_that_is_not_finite_stays_so(kind: str, scheme: str) -> None:
    code = derivative_code(kind, scheme)
    packed = launch_encode(torch.ones(2, device=DEVICE), code)
    dz = launch_apply(torch.tensor([math.nan, math.inf], device=DEVICE), packed, code)
    assert dz[0].isnan()
    assert dz[1] == math.inf


def test_the_operators_run_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    for name in ("launch_encode", "launch_apply"):
        launch = getattr(codes_triton, name)
        monkeypatch.setattr(codes_triton, name, lambda *args, launch=launch: launched.append(launch) or launch(*args))
    z = draw(100)
    for code in (derivative_code("silu", "2bit"), derivative_code("silu", "8bit"), code_of(F.silu, "2bit")):
        launched.clear()
        codes.apply_code(z, codes.encode(z, code), code)
        assert launched == [launch_encode, launch_apply]


def test_values_of_an_unknown_function_are_encoded_by_the_reference() -> None:
    z, code = draw(1500), code_of(lambda t: t * torch.sigmoid(2 * t), "8bit")
    packed = codes.encode(z, code)
    assert torch.equal(packed, _encode(z, code))
    assert torch.equal(codes.apply_code(z, packed, code), _apply(z, packed, code))


def test_fp64_is_left_to_the_reference() -> None:
    z, code = draw(100, dtype=torch.float64), derivative_code("silu", "8bit")
    assert codes.apply_code(z, codes.encode(z, code), code).dtype == torch.float64
