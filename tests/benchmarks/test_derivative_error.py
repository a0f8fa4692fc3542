"""The benchmark of coded derivatives measures what it says and sees what is wrong."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import derivative_error
from benchmarks.derivative_error import RELU_STEP, TARGETS, Row, compare, measure, shortfalls
from memopt.kernels.derivative_codes.codes import derivative_code
from memopt.torch_compat.activations import ACTIVATIONS


@pytest.fixture
def few_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(derivative_error, "POINTS", 2**15 + 1)


def rows_at_the_targets() -> list[Row]:
    return [Row(kind, scheme, 2, (least + most) / 200, 1.0, 0.1) for (kind, scheme), (least, most) in TARGETS.items()]


@pytest.mark.usefixtures("few_points")
def test_the_exact_derivative_has_no_error_and_a_scaled_one_has_its_scale() -> None:
    z = torch.linspace(-4, 4, 1001)
    slope = ACTIVATIONS["silu"].gradient(torch.ones_like(z, dtype=torch.float64), z.double())
    exact, scaled = compare("silu", "2bit", 2, z, slope), compare("silu", "2bit", 2, z, 1.05 * slope)
    assert (exact.error, exact.cosine) == pytest.approx((0, 1))
    assert (scaled.error, scaled.cosine) == pytest.approx((0.05, 1))
    assert scaled.largest == pytest.approx(0.05 * slope.abs().max().item())


@pytest.mark.usefixtures("few_points")
@pytest.mark.parametrize(("kind", "percent"), [("gelu_erf", 32.0), ("silu", 42.1)])
def test_one_bit_has_the_error_of_a_relu_step(kind: str, percent: float) -> None:
    assert 100 * measure(kind, RELU_STEP).error == pytest.approx(percent, abs=0.1)


@pytest.mark.usefixtures("few_points")
@pytest.mark.parametrize("scheme", ["published", "3bit", "8bit"])
def test_what_is_measured_is_what_the_code_says_of_itself(scheme: str) -> None:
    assert measure("gelu_erf", scheme).error == pytest.approx(derivative_code("gelu_erf", scheme).error, rel=0.01)


def test_rows_within_their_targets_pass() -> None:
    assert shortfalls(rows_at_the_targets()) == []


def test_a_row_that_is_missing_or_outside_its_target_falls_short() -> None:
    rows = rows_at_the_targets()
    for i, row in enumerate(rows):
        (line,) = shortfalls(rows[:i] + rows[i + 1 :])
        assert f"{row.kind}, {row.scheme} was not measured" in line
        (line, *_) = shortfalls([*rows[:i], replace(row, error=row.error + 0.2), *rows[i + 1 :]])
        assert line.startswith(f"{row.kind}, {row.scheme}: error")


def test_a_fit_that_the_published_code_beats_falls_short() -> None:
    (line,) = shortfalls([*rows_at_the_targets(), Row("silu", "5bit", 5, 0.48, 1.0, 0.1)])
    assert "the published code has 47.10%" in line


@pytest.mark.usefixtures("few_points")
def test_the_command_prints_a_table_and_writes_json(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(derivative_error, "KINDS", ("gelu_erf", "silu"))
    file = tmp_path / "new" / "derivative_error.json"
    assert derivative_error.main(["--check", "--json", str(file)]) == 0
    assert "8bit" in capsys.readouterr().out
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 12
    assert all(row["passed"] for row in rows)
    monkeypatch.setattr(derivative_error, "KINDS", ("gelu_erf",))
    assert derivative_error.main(["--check"]) == 1
    assert "falls short: silu, 2bit was not measured" in capsys.readouterr().err
