"""The gradient level of recipes that sample: noise passes, bias and errors elsewhere fail; and what the report says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import memopt.kernels.sampled_linear.function as sampled_linear
import memopt.patches.sampled_linear.checks as sampling_checks
import memopt.patches.sampled_linear.slot as sampled
from memopt.cli.main import main
from memopt.patches.sampled_linear.checks import DRAWS
from tests.verification.test_approximation import checks, patched


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return patched(tmp_path_factory.mktemp("sampled"), "bert", "sampled", "gradient_error=1.0").out


def test_sampling_adds_noise_and_nothing_else(folder: Path) -> None:
    found = checks(folder)
    assert {check.status for check in found.values()} == {"pass"}, found
    assert found["sampling.others"].value == 0
    noise = found["sampling.noise"]
    assert noise.value is not None
    assert 0.05 < noise.value < 5
    assert noise.n == DRAWS


def test_every_method_passes(tmp_path: Path) -> None:
    settings = ("activations.code=8bit", "gradient_error=1.0", "linears.budget=0.5")
    folder = patched(tmp_path, "bert", "wta-crs", *settings).out
    found = checks(folder)
    assert {check.status for check in found.values()} == {"pass"}, found


@pytest.mark.parametrize("fault", ["scale dropped", "top rows unscaled", "twice too large"])
def test_bias_fails(folder: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    sample_rows = sampled.sample_rows

    def faulty(scores: Tensor, k: int, method: object) -> tuple[Tensor, Tensor]:
        rows, weights = sample_rows(scores, k, method)  # type: ignore[arg-type]
        if fault == "scale dropped":
            return rows, torch.ones_like(weights)
        if fault == "top rows unscaled":
            return scores.topk(k).indices.int(), torch.ones_like(weights)
        return rows, 2 * weights

    monkeypatch.setattr(sampled, "sample_rows", faulty)
    found = checks(folder)
    assert "fail" in {found[f"sampling.{name}"].status for name in ("bias", "scale", "noise")}
    assert found["sampling.others"].status == "pass"


def test_weights_of_one_block_that_are_a_tenth_too_large_fail_by_its_name(folder, monkeypatch) -> None:
    sample_rows, calls = sampled.sample_rows, []

    def faulty(scores: Tensor, k: int, method: object) -> tuple[Tensor, Tensor]:
        rows, weights = sample_rows(scores, k, method)  # type: ignore[arg-type]
        calls.append(k)
        return rows, weights * (1.1 if len(calls) == 1 else 1.0)

    monkeypatch.setattr(sampled, "sample_rows", faulty)
    check = checks(folder)["sampling.weights"]
    assert (check.status, check.subject) == ("fail", "bert.encoder.layer.0")


@pytest.mark.parametrize("gradient", ["input", "bias"])
def test_a_gradient_that_one_linear_scales_by_a_percent_fails_by_its_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch, gradient: str
) -> None:
    name = "bert.encoder.layer.1.output.dense"
    (file,) = folder.glob("*.safetensors")
    own = load_file(file)[f"{name}.weight"].float()
    backward, number = sampled_linear.SampledLinearFunction.backward, {"input": 0, "bias": 2}[gradient]

    def faulty(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        found = list(backward(ctx, dy))
        if torch.equal(ctx.saved_tensors[1], own):
            found[number] *= 1.01
        return tuple(found)

    monkeypatch.setattr(sampled_linear.SampledLinearFunction, "backward", staticmethod(faulty))
    check = checks(folder)["sampling.others"]
    assert (check.status, check.subject) == ("fail", name)


def test_a_model_in_which_nothing_is_sampled_is_reported(tmp_path: Path) -> None:
    result = patched(tmp_path, "llama", "sampled")
    assert "samples no linear of this model" in " ".join(result.notes)
    assert checks(result.out)["sampling.linears"].status == "pass"


def test_a_plan_that_samples_linears_of_which_none_is_sampled_fails(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(sampling_checks, "samplings_in", lambda model: {})
    check = checks(folder)["sampling.linears"]
    assert check.status == "fail"
    assert check.value


def test_the_report_predicts_the_noise_and_names_the_exact_alternative(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["sampling"]
    assert found["not_measured"] is None
    assert found["relative_rmse"] > found["relative_rmse_at_best"] > 0
    assert {each["module"].rpartition(".")[2] for each in found["linears"]} == {"dense"}
    assert "accumulated over 4 passes" in found["exact_alternative"]
    assert main(["report", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "Expected relative RMSE of dW" in out
    assert "Exact alternative: micro-batches of 1/4 of the batch" in out
    assert max(len(line) for line in out.splitlines()) <= 80


def test_without_weights_the_report_says_why_it_predicts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.trace.builders import named_config

    named_config("bert").save_pretrained(tmp_path)
    assert main(["report", str(tmp_path), "--recipe", "wta-crs", "--json"]) == 0
    assert "not in a local folder" in json.loads(capsys.readouterr().out)["sampling"]["not_measured"]


def test_an_exact_recipe_has_nothing_of_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder), "--recipe", "exact-unfolded", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sampling"] is None
