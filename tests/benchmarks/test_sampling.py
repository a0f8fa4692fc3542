"""The benchmark of samplers measures what it says and sees what is wrong."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import sampling, sampling_models
from benchmarks.sampling import EXACT, Row, draw_case, model_shortfalls, shortfalls
from benchmarks.sampling_models import BOTH, MODELS, Errors
from memopt.kernels.sampled_linear.sampling import METHODS, sample_rows
from tests.support import sampling_cases
from tests.support.sampling_cases import KEPT, Case, Outcome, cases, draw, outcome

SOUND = Outcome("flat", "crs", draws=4000, off=0.01, measured=1.0, expected=1.0, spread=0.004)


def rows_that_pass() -> list[Row]:
    rows = [replace(SOUND, case=case, method=method) for case in ("heavy-tailed", "flat") for method in METHODS]
    exact = [replace(SOUND, case=EXACT[0], method=m, off=0.0, measured=0.0, expected=0.0, spread=0.0) for m in METHODS]
    return [Row(row, row) for row in rows + exact]


def errors_that_pass() -> list[Errors]:
    errors = {"systematic": 0.8, "wta-crs": 1.0, "crs": 1.1, "uniform": 0.5}
    return [Errors(name, 3, BOTH, 0.3, errors) for name in MODELS]


def test_a_draw_is_seen_as_the_error_of_its_estimate() -> None:
    case = cases()["heavy-tailed"]
    off = draw(case, "crs", 50, torch.Generator().manual_seed(0))
    generator, truth, errors, mean = torch.Generator().manual_seed(0), case.dy.t() @ case.x, [], 0.0
    for _ in range(50):
        rows, weights = sample_rows(case.scores, KEPT, "crs", generator)
        estimate = (case.dy[rows] * weights.double()[:, None]).t() @ case.x[rows]
        errors.append(float((estimate - truth).square().sum() / truth.square().sum()))
        mean += estimate / 50
    result = outcome(case, "crs", off)
    assert result.measured**2 == pytest.approx(sum(errors) / 50, rel=1e-9)
    assert result.off == pytest.approx(float((mean - truth).norm() / truth.norm()), rel=1e-9)
    assert result.spread == pytest.approx(float(torch.tensor(errors).std()) / 50**0.5 / (sum(errors) / 50), rel=1e-4)
    assert result.z == pytest.approx(result.off / (result.expected / 50**0.5), rel=1e-9)


def test_draws_go_on_until_the_variance_is_sharp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "DRAWS", 100)
    monkeypatch.setattr(sampling, "MOST_DRAWS", 1500)
    case = cases()["heavy-tailed"]
    row = draw_case(case, "crs")
    assert row.first.draws == 100 < row.all.draws < 1500
    assert row.all.spread <= sampling.TOLERANCE / 3 < row.first.spread
    assert draw_case(cases()["empty cache"], "crs").all.draws == 1500


def test_cases_are_what_their_names_say() -> None:
    found = cases()
    assert (found["flat"].scores == 1).all()
    torch.testing.assert_close(found["flat"].products.diagonal(), torch.ones(256, dtype=torch.float64))
    assert not torch.equal(found["empty cache"].scores, found["heavy-tailed"].scores)
    assert found["1e-9-scaled"].scores.max() < 1e-6
    assert KEPT < int((found["part-zero"].scores > 0).sum()) < 256
    assert int((found["single row"].scores > 0).sum()) == 1
    assert 1 < int((found["few rows"].scores > 0).sum()) <= KEPT


def test_rows_as_they_should_be_pass() -> None:
    assert shortfalls(rows_that_pass()) == []
    assert model_shortfalls(errors_that_pass()) == []


@pytest.mark.parametrize(
    ("index", "change", "said"),
    [
        (0, {"off": 0.05}, "z = 3.16"),
        (1, {"measured": 1.03}, "times the formula's"),
        (8, {"measured": 1e-6}, "not exact"),
        (9, {"off": 1e-6}, "the mean of"),
        (10, {"expected": 1e-3}, "not exact"),
        (0, {"measured": 1.02}, "heavy-tailed: WTA-CRS is off by"),
        (0, {"expected": 1.01, "measured": 1.01}, "heavy-tailed: WTA-CRS is expected to be off by"),
        (4, {"expected": 0.99}, "are not equal"),
        (0, {"expected": float("nan")}, "times the formula's"),
    ],
)
def test_a_number_that_is_not_as_it_should_be_falls_short(index: int, change: dict[str, float], said: str) -> None:
    rows = rows_that_pass()
    wrong = replace(rows[index].all, **change)
    rows[index] = Row(wrong, wrong)
    assert any(said in line for line in shortfalls(rows))


def test_an_order_of_samplers_that_is_wrong_and_a_model_that_is_missing_fall_short() -> None:
    rows = errors_that_pass()
    assert model_shortfalls(rows[1:]) == [f"models/{rows[0].model} is missing"]
    for better, worse in (("systematic", "wta-crs"), ("wta-crs", "crs")):
        wrong = replace(rows[0], errors=rows[0].errors | {better: rows[0].errors[worse] + 0.01})
        assert any(f"{better} " in line for line in model_shortfalls([wrong, rows[1]]))


def test_fewer_columns_keep_the_inner_products() -> None:
    rows = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    few = sampling_models._fewer_columns(rows)
    assert few.shape == (5, 5)
    torch.testing.assert_close(few @ few.t(), rows.double() @ rows.double().t())


def test_captured_tensors_give_the_gradients_of_the_weights(minilm) -> None:
    model, seen = sampling_models.step(minilm.name)
    assert len(seen) == 36
    for place, tensors in seen.items():
        gradient = model.get_submodule(place).weight.grad
        assert len(tensors["x"]) == 256
        # Sums of 256 products in fp32 in another order; keys have no gradient but rounding, attention ignores a shift.
        scale = float((tensors["dy"].abs().t() @ tensors["x"].abs()).max())
        torch.testing.assert_close(tensors["dy"].t() @ tensors["x"], gradient, rtol=1e-5, atol=256 * 2.0**-24 * scale)


def test_the_command_prints_tables_and_writes_json(monkeypatch, tmp_path, capsys) -> None:
    few = {name: cases()[name] for name in ("heavy-tailed", "single row")}
    monkeypatch.setattr(sampling, "cases", lambda: few)
    monkeypatch.setattr(sampling, "DRAWS", 200)
    monkeypatch.setattr(sampling, "MOST_DRAWS", 1)
    monkeypatch.setattr(sampling, "TOLERANCE", 0.3)
    monkeypatch.setattr(sampling, "measure", errors_that_pass)
    file = tmp_path / "new" / "sampling.json"
    assert sampling.main(["--check", "--json", str(file)]) == 0
    assert "k = rows" in capsys.readouterr().out
    written = json.loads(file.read_text())
    assert len(written["rows"]) == 12
    assert all(row["passed"] for row in written["rows"])
    assert len(written["models"]) == len(MODELS)


def test_a_biased_sampler_fails_the_command(monkeypatch, capsys) -> None:
    def unscaled(case: Case, method, draws, generator, k=KEPT):  # type: ignore[no-untyped-def]
        off = sampling_cases.draw(case, method, draws, generator, k)
        return torch.where(off > -1, 0.0, -1.0).to(off.dtype)

    monkeypatch.setattr(sampling, "cases", lambda: {"heavy-tailed": cases()["heavy-tailed"]})
    monkeypatch.setattr(sampling, "DRAWS", 200)
    monkeypatch.setattr(sampling, "MOST_DRAWS", 1)
    monkeypatch.setattr(sampling, "draw", unscaled)
    monkeypatch.setattr(sampling, "measure", errors_that_pass)
    assert sampling.main(["--check"]) == 1
    assert "falls short: heavy-tailed, crs: the mean of 200 draws" in capsys.readouterr().err
    assert sampling.main([]) == 0
