"""Codes of derivatives: the published bits, what the packing promises, randomness. The fits are in test_code_fit.py."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from memopt.kernels.derivative_codes.codes import apply_code, code_of, derivative_code, encode
from memopt.kernels.derivative_codes.schemes import FLAG_GROUP, PUBLISHED, fp32_below
from memopt.torch_compat.activations import ACTIVATIONS

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
#: One of each width and family.
FEW = [("gelu_erf", "2bit"), ("silu", "3bit"), ("mish", "4bit"), ("gelu_tanh", "8bit"), ("silu", "4bit")]
few_codes = pytest.mark.parametrize(("kind", "scheme"), FEW)


def draw(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def slope_of(z: Tensor, kind: str) -> Tensor:
    return ACTIVATIONS[kind].gradient(torch.ones_like(z), z)


def unpacked(packed: Tensor, bits: int, count: int) -> list[int]:
    """The codes in the first bits of `packed`, read as one long number, low bits first."""
    number = int.from_bytes(bytes(packed[: -(-count * bits // 8)].tolist()), "little")
    return [number >> bits * i & 2**bits - 1 for i in range(count)]


# --- the published codes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "slopes", "thresholds"),
    [
        (
            "gelu_erf",
            (-0.04922261145617846, 1.0979632065417297, -0.048740595085551286),
            (-3.1858810036855245, -0.001178821281161997, 3.190832613414926),
        ),
        (
            "silu",
            (-0.04060357190528599, 1.080925428529668, -0.040321856624382146),
            (-6.3050461001646445, -0.0008684942046214787, 6.325815242089708),
        ),
    ],
)
def test_published_codes_and_gradients_are_those_of_the_formula_element_by_element(kind, slopes, thresholds):
    values = [*draw(101, scale=4.0).tolist(), *torch.tensor(thresholds).tolist(), 0.0, -0.0, math.inf, -math.inf]
    z, dh = torch.tensor(values), draw(len(values), seed=1)
    expected_bytes, expected = [0] * -(-len(values) // 4), []
    for i, (x, gradient) in enumerate(zip(z.tolist(), dh.tolist(), strict=True)):
        passed = [a for a, c in zip(slopes, thresholds, strict=True) if x > c]
        expected_bytes[i // 4] |= len(passed) << 2 * (i % 4)
        expected.append(gradient * sum(passed))
    code = derivative_code(kind, "published")
    packed = encode(z, code)
    assert packed.tolist() == [*expected_bytes, 0]
    torch.testing.assert_close(apply_code(dh, packed, code), torch.tensor(expected), rtol=1e-6, atol=1e-7)


def test_the_published_quick_gelu_is_silu_with_a_scaled_argument():
    z = draw(5000, scale=3.0, dtype=torch.float64)
    quick, silu = derivative_code("quick_gelu", "published"), derivative_code("silu", "published")
    assert torch.equal(encode(z, quick), encode(1.702 * z, silu))
    assert quick.levels == silu.levels


@pytest.mark.parametrize("kind", list(PUBLISHED))
def test_published_steps_add_up_to_one_and_keep_the_primitive_on_the_identity(kind):
    _, slopes, thresholds = PUBLISHED[kind]
    assert sum(slopes) == pytest.approx(1, abs=1e-14)
    assert sum(a * c for a, c in zip(slopes, thresholds, strict=True)) == pytest.approx(0, abs=1e-12)


# --- packing ---------------------------------------------------------------------------------------------------------


@few_codes
@pytest.mark.parametrize("count", [0, 1, 3, 7, 8, 1023, 1024, 1025, 5000])
def test_the_bytes_are_codes_then_flags(kind, scheme, count):
    code, z = derivative_code(kind, scheme), draw(count)
    packed = encode(z, code)
    assert packed.dtype == torch.uint8
    assert packed.shape == (math.ceil(count * code.bits / 8) + math.ceil(count / 1024),)
    assert packed.numel() == code.packed_bytes(count)
    assert not packed[code.code_bytes(count) :].any()
    levels = [code.levels[c] for c in unpacked(packed, code.bits, count)]
    assert torch.equal(apply_code(torch.ones(count), packed, code), torch.tensor(levels))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["gelu_erf", "silu", "mish"])
def test_a_step_code_counts_the_thresholds_strictly_below(kind, dtype):
    code = derivative_code(kind, "3bit")
    at = torch.tensor(code.thresholds, dtype=torch.float64).to(dtype)
    z = torch.cat([at, torch.nextafter(at, at - 1), torch.nextafter(at, at + 1), draw(100, dtype=dtype)])
    expected = [sum(x > c for c in code.thresholds) for x in z.double().tolist()]
    assert unpacked(encode(z, code), 3, z.numel()) == expected


@pytest.mark.parametrize("value", [0.1, 0.3, -0.1, 1 / 3, 0.0, 0.5, -2.4169464])
def test_thresholds_in_fp32_part_the_same_numbers(value):
    below = torch.tensor(fp32_below(value))
    assert below.item() <= value < torch.nextafter(below, torch.tensor(math.inf)).item()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", ["4bit", "8bit"])
def test_a_value_code_is_that_of_the_nearest_level(scheme, dtype):
    code, z = derivative_code("gelu_erf", scheme), draw(4000, dtype=dtype, scale=2.0)
    slope = apply_code(torch.ones_like(z, dtype=torch.float64), encode(z, code), code)
    distance = (slope - slope_of(z.double(), "gelu_erf")).abs()
    assert distance.max() <= code.step / 2 * (1 + 1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@few_codes
def test_the_gradient_is_one_product_rounded_once(kind, scheme, dtype):
    code, z, dh = derivative_code(kind, scheme), draw(2003, dtype=dtype), draw(2003, dtype=dtype, seed=1)
    packed = encode(z, code)
    levels = torch.tensor([code.levels[c] for c in unpacked(packed, code.bits, 2003)], dtype=torch.float64)
    precision = torch.float64 if dtype == torch.float64 else torch.float32
    assert torch.equal(apply_code(dh, packed, code), (dh.to(precision) * levels.to(precision)).to(dtype))


LAYOUTS = {
    "transposed": lambda t: t.transpose(0, 1),
    "half of each row": lambda t: t[..., : t.size(-1) // 2],
    "every second element": lambda t: t[..., ::2],
    "expanded over rows": lambda t: t[:, :1].expand(-1, 4, -1),
    "expanded from a scalar": lambda t: t[0, 0, 0].expand(3, 4, 5),
    "a scalar": lambda t: t[0, 0, 0],
    "empty": lambda t: t[:0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@few_codes
def test_elements_count_in_logical_order(kind, scheme, layout):
    code = derivative_code(kind, scheme)
    z, dh = LAYOUTS[layout](draw(3, 5, 40)), LAYOUTS[layout](draw(3, 5, 40, seed=1))
    packed = encode(z, code)
    assert torch.equal(packed, encode(z.contiguous(), code))
    dz = apply_code(dh, packed, code)
    assert dz.shape == dh.shape
    assert dz.is_contiguous()
    assert torch.equal(dz, apply_code(dh.contiguous(), packed, code))


@few_codes
def test_a_nan_makes_its_group_of_gradients_nan_and_no_other(kind, scheme):
    code, z = derivative_code(kind, scheme), draw(2 * FLAG_GROUP + 10)
    z[FLAG_GROUP + 5] = math.nan
    dz = apply_code(torch.ones_like(z), encode(z, code), code)
    assert dz[FLAG_GROUP : 2 * FLAG_GROUP].isnan().all()
    assert dz.isnan().sum() == FLAG_GROUP
    z[-1] = math.nan
    assert apply_code(torch.ones_like(z), encode(z, code), code)[2 * FLAG_GROUP :].isnan().all()


def test_a_step_code_of_infinity_is_that_of_the_tail():
    code = derivative_code("gelu_erf", "2bit")
    z = torch.tensor([-math.inf, math.inf])
    assert apply_code(torch.ones(2), encode(z, code), code).tolist() == [0.0, 1.0]


@few_codes
def test_a_gradient_that_is_not_finite_stays_so(kind, scheme):
    code, z = derivative_code(kind, scheme), torch.ones(2)
    dz = apply_code(torch.tensor([math.nan, math.inf]), encode(z, code), code)
    assert dz[0].isnan()
    assert dz[1] == math.inf


@pytest.mark.parametrize("kind", ["gelu_erf", "silu", "softplus"])
def test_derivatives_at_the_ends_of_their_range_do_not_wrap_around(kind):
    code = derivative_code(kind, "8bit")
    z = torch.linspace(-20, 20, 40_001)
    slope = apply_code(torch.ones_like(z), encode(z, code), code)
    assert (slope - slope_of(z, kind)).abs().max() <= code.step * 0.501


# --- where it runs ---------------------------------------------------------------------------------------------------


@few_codes
def test_inputs_are_left_alone_and_no_graph_is_made(kind, scheme):
    code, z, dh = derivative_code(kind, scheme), draw(100).requires_grad_(), draw(100, seed=1)
    packed = encode(z, code)
    before = packed.clone()
    dz = apply_code(dh, packed, code)
    assert not dz.requires_grad
    assert torch.equal(z, draw(100))
    assert torch.equal(dh, draw(100, seed=1))
    assert torch.equal(packed, before)


@pytest.mark.parametrize("scheme", ["3bit", "8bit"])
def test_the_code_does_not_depend_on_autocast_or_inference_mode(scheme):
    known, other = derivative_code("mish", scheme), code_of(lambda t: t * torch.tanh(F.softplus(t)), scheme)
    z = draw(1500, dtype=torch.bfloat16)
    for code in (known, other):
        expected = encode(z, code)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(encode(z, code), expected)
    with torch.inference_mode():
        assert torch.equal(encode(z, known), encode(z, known))


@few_codes
@pytest.mark.parametrize("device", ["meta", "fake"])
def test_tensors_without_memory_pass_through_in_both_directions(device, kind, scheme):
    code = derivative_code(kind, scheme)
    with FakeTensorMode() if device == "fake" else nullcontext():
        z = torch.empty(3, 700, device="cpu" if device == "fake" else device, dtype=torch.bfloat16)
        packed = encode(z, code)
        dz = apply_code(z, packed, code)
    assert packed.shape == (code.packed_bytes(2100),)
    assert (dz.shape, dz.dtype) == (z.shape, z.dtype)


def test_codes_of_another_tensor_are_refused():
    code = derivative_code("silu", "2bit")
    with pytest.raises(ValueError, match=r"27 bytes hold the 2-bit codes of 101 elements, not 26"):
        apply_code(torch.ones(101), encode(torch.ones(100), code), code)
