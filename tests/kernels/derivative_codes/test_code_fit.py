"""The fitted codes against the analytic derivative: conditions of a minimum, errors, faults that must be noticed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from memopt.errors import MemoptError
from memopt.kernels.derivative_codes.codes import apply_code, code_of, derivative_code, encode
from memopt.kernels.derivative_codes.fit import KINDS, fit
from memopt.kernels.derivative_codes.schemes import PUBLISHED, SCHEMES, CodeError, derivative
from memopt.torch_compat.activations import ACTIVATIONS
from tools import fit_codes
from tools.fit_codes import differences

CODES = [(kind, scheme) for kind in KINDS for scheme in SCHEMES if scheme != "published" or kind in PUBLISHED]
every_code = pytest.mark.parametrize(("kind", "scheme"), CODES)


def draw(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def slope_of(z: Tensor, kind: str) -> Tensor:
    return ACTIVATIONS[kind].gradient(torch.ones_like(z), z)


def measured_error(packed: Tensor, z: Tensor, kind: str, scheme: str) -> float:
    """Relative RMS error of the derivative that apply_code takes from `packed`."""
    return relative_error(apply_code(torch.ones_like(z), packed, derivative_code(kind, scheme)), z, kind)


def relative_error(slope: Tensor, z: Tensor, kind: str) -> float:
    truth = slope_of(z.double(), kind)
    return float((slope.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("scheme", ["2bit", "3bit"])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_meet_the_conditions_of_least_squares_with_pinned_tails(kind, scheme):
    code = derivative_code(kind, scheme)
    f = ACTIVATIONS[kind].value
    c, levels = (torch.tensor(numbers, dtype=torch.float64) for numbers in (code.thresholds, code.levels))
    far = slope_of(torch.tensor([-50.0, 50.0], dtype=torch.float64), kind)
    torch.testing.assert_close(levels[[0, -1]], far, rtol=0, atol=1e-9)
    torch.testing.assert_close(slope_of(c, kind), (levels[1:] + levels[:-1]) / 2, rtol=0, atol=1e-9)
    torch.testing.assert_close(levels[1:-1], f(c).diff() / c.diff(), rtol=0, atol=1e-9)


def squared_distance(kind: str, thresholds: list[float], levels: list[float]) -> float:
    """Integral of (f' - steps)**2."""
    z = torch.linspace(-30, 30, 600_001, dtype=torch.float64)
    codes = sum((z > c).long() for c in thresholds)
    steps = torch.tensor(levels, dtype=torch.float64)[codes]
    return float((steps - slope_of(z, kind)).square().mean() * 60)


@pytest.mark.parametrize(
    ("kind", "threshold", "levels", "distance"),
    [
        ("gelu_erf", 0.45181, [0.0, 0.32582, 0.67418, 1.0], 0.0452),
        ("silu", 0.73856, [0.0, 0.32334, 0.67666, 1.0], None),
    ],
)
def test_two_bits_are_at_least_as_near_as_the_best_known_ones(kind, threshold, levels, distance):
    code = derivative_code(kind, "2bit")
    ours = squared_distance(kind, list(code.thresholds), list(code.levels))
    assert ours <= squared_distance(kind, [-threshold, 0.0, threshold], levels) + 1e-9
    assert code.thresholds == pytest.approx([-threshold, 0.0, threshold], abs=1e-3)
    assert code.levels == pytest.approx(levels, abs=1e-3)
    if distance:
        assert ours == pytest.approx(distance, abs=5e-5)


@pytest.mark.parametrize("scheme", ["4bit", "8bit"])
@pytest.mark.parametrize("kind", KINDS)
def test_value_levels_span_the_derivative_evenly_and_are_exact_in_fp32(kind, scheme):
    code = derivative_code(kind, scheme)
    levels = torch.tensor(code.levels, dtype=torch.float64)
    slope = slope_of(torch.linspace(-40, 40, 80_001, dtype=torch.float64), kind)
    assert len(levels) == 2**code.bits
    assert torch.equal(levels, levels.float().double())
    assert torch.equal(levels.diff(), torch.full_like(levels[1:], code.step))
    assert slope.min() - 3e-7 <= levels[0] <= slope.min() + 1e-7
    assert slope.max() - 1e-7 <= levels[-1] <= slope.max() + 1e-4


ERRORS = {
    ("gelu_erf", "published"): (0.357, 1e-3),
    ("gelu_erf", "2bit"): (0.141, 1e-3),
    ("gelu_erf", "3bit"): (0.086, 1e-3),
    ("gelu_erf", "4bit"): (0.034, 1e-3),
    ("gelu_erf", "8bit"): (0.0021, 1e-4),
    ("silu", "published"): (0.471, 1e-3),
    ("silu", "2bit"): (0.148, 1e-3),
    ("silu", "3bit"): (0.103, 1e-3),
    ("silu", "4bit"): (0.037, 1e-3),
    ("silu", "8bit"): (0.0022, 1e-4),
}


@pytest.mark.parametrize(("kind", "scheme"), list(ERRORS))
def test_errors_are_those_of_the_table(kind, scheme):
    expected, tolerance = ERRORS[kind, scheme]
    assert derivative_code(kind, scheme).error == pytest.approx(expected, abs=tolerance)


@every_code
def test_the_stored_error_is_that_of_the_codes_on_normal_numbers(kind, scheme):
    z = draw(200_000)
    code = derivative_code(kind, scheme)
    assert measured_error(encode(z, code), z, kind, scheme) == pytest.approx(code.error, rel=0.01)


@pytest.mark.parametrize("kind", list(PUBLISHED))
def test_every_fitted_code_beats_the_published_one(kind):
    published = derivative_code(kind, "published").error
    assert all(derivative_code(kind, scheme).error < published / 2 for scheme in SCHEMES if scheme != "published")


@pytest.mark.parametrize("kind", KINDS)
def test_more_bits_are_nearer(kind):
    errors = [derivative_code(kind, scheme).error for scheme in ("2bit", "3bit", "4bit", "8bit")]
    assert errors == sorted(errors, reverse=True)


def is_right(slope: Tensor, z: Tensor, kind: str, scheme: str) -> bool:
    """Whether the derivative has the stored error, and its mean is that of f': for GELU and SiLU f'(z) + f'(-z) = 1,
    and their codes keep to it. The error alone lets a scale pass, since least squares on the line are none on N(0, 1).
    """
    truth = slope_of(z.double(), kind)
    bias = float((slope.double() - truth).mean() / truth.mean())
    return abs(bias) < 0.01 and relative_error(slope, z, kind) < 1.02 * derivative_code(kind, scheme).error


@pytest.mark.parametrize("scheme", ["2bit", "3bit", "4bit", "8bit"])
@pytest.mark.parametrize("kind", ["gelu_erf", "silu"])
def test_codes_shifted_by_one_and_a_scale_off_by_five_percent_are_noticed(kind, scheme):
    z = draw(200_000)
    code = derivative_code(kind, scheme)
    slope = apply_code(torch.ones_like(z), encode(z, code), code)
    assert is_right(slope, z, kind, scheme)
    assert not is_right(apply_code(torch.ones_like(z), encode(z.roll(1), code), code), z, kind, scheme)
    for off in (0.95, 1.05):
        assert not is_right(off * slope, z, kind, scheme)


def test_the_shipped_codes_are_what_the_fit_finds():
    shipped = fit_codes.json.loads(fit_codes.SHIPPED.read_text())["codes"]
    for kind, scheme in [("gelu_erf", "2bit"), ("silu", "3bit"), ("mish", "8bit")]:
        assert not list(differences(shipped[kind][scheme], fit(ACTIVATIONS[kind].value, scheme)))


def test_the_check_ends_with_code_1_where_a_number_differs(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(fit_codes, "KINDS", ("gelu_tanh",))
    monkeypatch.setattr(fit_codes, "SHIPPED", tmp_path / "codes.json")
    assert fit_codes.main([]) == 0
    assert fit_codes.main(["--check"]) == 0
    text = fit_codes.SHIPPED.read_text()
    number = str(derivative_code("gelu_tanh", "2bit").levels[1])
    assert number in text
    fit_codes.SHIPPED.write_text(text.replace(number, str(float(number) + 1e-8)))
    assert fit_codes.main(["--check"]) == 1
    assert "gelu_tanh, 2bit, levels[1]" in capsys.readouterr().err


# --- other activations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES[1:])
def test_the_code_of_any_activation_is_fitted_like_that_of_a_known_one(scheme):
    z = draw(3000)
    other, known = code_of(lambda t: t * torch.sigmoid(t), scheme), derivative_code("silu", scheme)
    assert other.kind == "other"
    assert other.thresholds == pytest.approx(known.thresholds, abs=1e-9)
    assert other.levels == pytest.approx(known.levels, abs=1e-6)
    assert other.error == pytest.approx(known.error, abs=1e-6)
    differing = encode(z, other) != encode(z, known)
    assert differing.float().mean() < 1e-3
    torch.testing.assert_close(
        apply_code(z, encode(z, other), other), apply_code(z, encode(z, known), known), rtol=0, atol=z.abs().max() * 0.1
    )


@pytest.mark.parametrize("function", [F.hardswish, torch.tanh, lambda z: F.gelu(z / 5)], ids=["kink", "bump", "wide"])
@pytest.mark.parametrize("scheme", ["2bit", "3bit", "4bit"])
def test_kinks_bumps_and_wide_activations_are_fitted_too(function, scheme):
    code = code_of(function, scheme)
    z = torch.linspace(-60, 60, 120_001, dtype=torch.float64)
    slope = apply_code(torch.ones_like(z), encode(z, code), code)
    truth = derivative(function, z)
    constant = (truth - truth.mean()).norm()
    assert (slope - truth).norm() < 0.4 * constant


def test_an_activation_whose_derivative_has_no_limit_is_refused():
    for scheme in ("2bit", "8bit"):
        with pytest.raises(CodeError, match="no limit"):
            code_of(lambda z: z.square(), scheme)


def test_what_there_is_not_is_an_error_that_names_what_there_is():
    with pytest.raises(
        ValueError, match=r"'mish' has no published code. Kinds that have one: gelu_erf, quick_gelu, silu"
    ):
        derivative_code("mish", "published")
    with pytest.raises(MemoptError, match="'relu' has no 2bit code"):
        derivative_code("relu", "2bit")
    for function in (derivative_code, code_of):
        with pytest.raises(CodeError, match=r"no code named '5bit'\. Codes: published, 2bit"):
            function("silu", "5bit")
    with pytest.raises(CodeError, match="published"):
        code_of(F.silu, "published")
