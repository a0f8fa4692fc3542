"""The gradient level of approximate recipes: what is declared is measured, planted faults are found."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import memopt.kernels.derivative_codes.function as coded
import memopt.patches.activation.module as activation_patch
import memopt.patches.compression.checks as compression_checks
import memopt.patches.compression.compressor as compression
from memopt.checkpoint.manifest import read_manifest
from memopt.kernels.quantize.layout import Quantized
from memopt.patches.checks import Check
from memopt.patches.swap import swap_state
from memopt.pipeline import PatchResult, patch_checkpoint
from memopt.verification.run import verify
from memopt.verification.trial import CheckpointTrial
from tests.factories import tiny_model


def patched(tmp_path: Path, name: str, recipe: str, *settings: str) -> PatchResult:
    tiny_model(name).save_pretrained(tmp_path / "original")
    return patch_checkpoint(tmp_path / "original", tmp_path / "out", recipe, overrides=settings)


def checks(folder: Path) -> dict[str, Check]:
    return {check.id: check for check in verify(folder, level="gradient").checks}


@pytest.mark.parametrize(
    ("name", "recipe"), [("bert", "approx-8bit"), ("llama", "approx-8bit"), ("bert", "mesa"), ("llama", "int8")]
)
def test_what_a_recipe_declares_holds_and_something_was_approximated(tmp_path: Path, name: str, recipe: str) -> None:
    found = checks(patched(tmp_path, name, recipe).out)
    assert {check.status for check in found.values()} == {"pass"}, found
    assert found["gradient.modules"].value < 1e-12  # with what is approximate switched off
    error = found["gradient.declared_error"].value
    assert error is not None
    assert error > 1e-5  # rounding in fp32 is 1e-7


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_published_codes_are_checked_against_the_published_tables(tmp_path: Path, name: str) -> None:
    found = checks(patched(tmp_path, name, "lowmemory-bp").out)
    assert {check.status for check in found.values()} == {"pass"}, found
    assert {"codes.levels", "codes.table"} <= found.keys()


def test_errors_of_codes_are_predicted_from_the_models_own_activations(tmp_path: Path) -> None:
    found = checks(patched(tmp_path, "bert", "approx-2bit", "gradient_error=1.0").out)
    predicted, measured = found["gradient.predicted_error"], found["gradient.declared_error"]
    assert predicted.threshold is not None
    assert measured.value is not None
    assert predicted.value == measured.value
    assert 0.1 < predicted.threshold < 2


def test_more_than_is_declared_fails(tmp_path: Path) -> None:
    found = checks(patched(tmp_path, "bert", "approx-2bit", "gradient_error=0.001").out)
    assert found["gradient.declared_error"].status == "fail"
    assert found["gradient.loss"].status == "pass"


def test_a_gradient_that_is_too_large_by_a_twentieth_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, apply_code = patched(tmp_path, "bert", "approx-8bit").out, coded.apply_code
    monkeypatch.setattr(coded, "apply_code", lambda dh, packed, code: 1.05 * apply_code(dh, packed, code))
    assert checks(folder)["gradient.worst_error"].status == "fail"


def test_a_forgotten_minimum_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, dequantize = patched(tmp_path, "bert", "mesa").out, compression.dequantize

    def without_minimum(quantized: Quantized) -> torch.Tensor:
        scales = quantized.scales.clone()
        scales[:, 0] = 0
        return dequantize(dataclasses.replace(quantized, scales=scales))

    monkeypatch.setattr(compression, "dequantize", without_minimum)
    assert checks(folder)["gradient.declared_error"].status == "fail"


@pytest.mark.parametrize("recipe", ["mesa", "int8"])
def test_steps_that_are_off_by_a_twentieth_in_one_block_fail_by_its_name(tmp_path, monkeypatch, recipe) -> None:
    folder, dequantize, calls = patched(tmp_path, "llama", recipe).out, compression.dequantize, []

    def with_wrong_steps(quantized: Quantized) -> torch.Tensor:
        calls.append(quantized)
        if len(calls) > 1:
            return dequantize(quantized)
        scales = quantized.scales * torch.tensor([1.0, 1.05])
        return dequantize(dataclasses.replace(quantized, scales=scales))

    (check,) = _checks_of_steps(monkeypatch, with_wrong_steps, folder)
    assert check.status == "fail"
    assert check.subject.startswith("model.layers.1")  # backward reads the last block first
    assert check.value > 5


def _checks_of_steps(monkeypatch, fault, folder: Path) -> list[Check]:
    """The check of steps, where the fault is there while tensors are compared."""
    with monkeypatch.context() as planted:
        planted.setattr(compression, "dequantize", fault)
        found = list(compression_checks.verify_rounding(CheckpointTrial(folder, read_manifest(folder).recipe)))
    return [check for check in found if check.id == "quantised.steps"]


@pytest.mark.parametrize("recipe", ["approx-8bit", "approx-2bit"])
def test_a_level_that_is_off_by_a_twentieth_fails_by_the_name_of_the_module(tmp_path, monkeypatch, recipe) -> None:
    folder, patch_activation = patched(tmp_path, "bert", recipe).out, activation_patch.patch_activation

    def wrong(module, site, rules=None):
        patch_activation(module, site, rules)
        state = swap_state(module)
        if "layer.1" in site.name and state.code is not None:
            levels = (*state.code.levels[:-1], state.code.levels[-1] * 1.05)
            code = dataclasses.replace(state.code, levels=levels)
            vars(module)["_memopt"] = dataclasses.replace(state, code=code)

    monkeypatch.setattr(activation_patch, "patch_activation", wrong)
    check = checks(folder)["codes.levels"]
    assert check.status == "fail"
    assert check.subject == "bert.encoder.layer.1.intermediate.intermediate_act_fn"


def test_a_forward_that_is_not_exact_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, forward = patched(tmp_path, "bert", "approx-8bit").out, coded.CodedFunction.forward
    monkeypatch.setattr(coded.CodedFunction, "forward", staticmethod(lambda *given: 2.0 * forward(*given)))
    assert checks(folder)["gradient.loss"].status == "fail"


def test_the_price_is_reported(tmp_path: Path) -> None:
    said = " ".join(patched(tmp_path, "bert", "int8").notes)
    assert "is approximate" in said
    assert "10%" in said
    assert "--recipe exact" in said
