"""Level "training" and the memory of a step: the situations hold every pair, right models pass, faults are named."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, BertModel, LlamaForCausalLM

from memopt.pipeline import patch_checkpoint
from memopt.verification import training
from memopt.verification.inputs import Probes
from memopt.verification.run import verify
from memopt.verification.situations import LONG, SITUATIONS, Situation, batches, without_dropout
from memopt.verification.trial import loss_of
from tests.factories import tiny_model
from tests.mutation.catalogue import Row, run
from tests.mutation.folders import workshop
from tests.mutation.planted import FAULTS
from tests.zoo.build import saved_twin

_NAMES = [field.name for field in dataclasses.fields(Situation)]
_VALUES = {name: {getattr(each, name) for each in SITUATIONS} for name in _NAMES}


def test_the_situations_hold_every_pair_but_outliers_in_16_bits():
    assert {name: len(values) for name, values in _VALUES.items()} == {
        "training": 2, "trains": 4, "precision": 3, "rows": 2, "tokens": 2, "padded": 2, "backward": 3, "evaluates": 2,
        "outliers": 2,
    }  # fmt: skip
    for one, other in itertools.combinations(_NAMES, 2):
        held = {(getattr(each, one), getattr(each, other)) for each in SITUATIONS}
        missing = set(itertools.product(_VALUES[one], _VALUES[other])) - held
        assert (
            missing <= {("bf16", True), ("autocast", True)}
            if (one, other) == ("precision", "outliers")
            else not missing
        )


def test_in_16_bits_the_long_rows_are_so_many_that_norms_compute_in_parts():
    model, ids = tiny_model("llama"), torch.arange(16)[None]
    probes = Probes(({"input_ids": ids},), ({"labels": ids},), "tokens")
    long = next(each for each in SITUATIONS if (each.precision, each.tokens) == ("bf16", LONG))
    (made, *_) = batches(model, probes, long)
    assert made["input_ids"].numel() * model.config.hidden_size >= 2**18


@pytest.fixture(scope="module")
def patched(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("situations")
    tiny_model("llama", torch.bfloat16).save_pretrained(root / "llama")
    patch_checkpoint(root / "llama", root / "patched")
    return root / "patched"


def test_a_right_checkpoint_passes_and_lists_what_is_unproved(patched):
    checks = {check.id: check for check in verify(patched, level="training").checks}
    assert {check.status for check in checks.values()} == {"pass"}
    assert checks["training.situations"].value == len(SITUATIONS)
    assert "not compared" in checks["training.situations"].detail


def test_nothing_lives_behind_a_step_of_a_right_checkpoint(patched):
    checks = {check.id: check for check in verify(patched, level="memory").checks}
    for id in ("memory.after_backward", "memory.second_step", "memory.peak", "memory.transient", "memory.arrays"):
        assert checks[id].status == "pass"


@pytest.mark.parametrize(
    ("fault", "architecture", "dtype", "check"),
    [
        ("the output of a norm is off in train mode", "bert", "fp32", "training.steps"),
        ("the gradient of a norm is off under autocast", "llama", "bf16", "training.rounding"),
        ("the output of a head is off above 300 rows", "phi3", "fp16", "training.rounding"),
        ("the output of a norm is off without gradients", "bert", "fp32", "training.evaluation"),
        ("a module draws random numbers", "bert", "fp32", "training.random_numbers"),
        ("a dropout has another mask in backward", "distilbert", "fp32", "training.dropout"),
        pytest.param(
            *("a block keeps a gradient of every step", "llama", "fp32", "memory.after_backward"),
            marks=pytest.mark.slow,
        ),
        ("a block keeps its last gradient after backward", "llama", "bf16", "memory.after_backward"),
        ("a block copies its result eight times for a moment", "llama", "bf16", "memory.transient"),
        ("a norm keeps its result as an array", "bert", "fp32", "memory.arrays"),
        ("a norm keeps its input in train mode", "llama", "fp32", "memory.second_step"),
        pytest.param(
            *("the output of a norm is off at odd lengths", "llama", "fp32", "training.steps"), marks=pytest.mark.slow
        ),
    ],
)
@pytest.mark.rotates(3)
def test_a_fault_of_one_situation_is_named(fault, architecture, dtype, check):
    (planted,) = (each for each in FAULTS if each.name == fault and each.kind == "situations")
    with workshop() as place:
        result = run(Row(planted, None, architecture, dtype), place)
    assert (result.outcome, result.check) == ("caught", check), result


def test_a_loss_that_is_detached_in_part_passes_as_stock_does(tmp_path, monkeypatch):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    BertForMaskedLM(BertConfig(vocab_size=64, max_position_embeddings=64, **sizes)).save_pretrained(tmp_path / "bert")
    patch_checkpoint(tmp_path / "bert", tmp_path / "patched")
    monkeypatch.setattr(
        training, "loss_of", lambda output: loss_of(output) + output.logits.detach().double().square().mean()
    )
    checks = {check.id: check for check in verify(tmp_path / "patched", level="training").checks}
    slope = checks["training.dropout"]
    assert slope.status == "pass"
    assert slope.value > 1e-3


def test_a_situation_in_which_the_loss_of_stock_modules_is_not_finite_is_not_compared(patched, monkeypatch):
    def loss(output):
        return loss_of(output) * (float("nan") if output.logits.dtype == torch.bfloat16 else 1)

    monkeypatch.setattr(training, "loss_of", loss)
    checks = {check.id: check for check in verify(patched, level="training").checks}
    exact = [each for each in SITUATIONS if each.precision == "exact"]
    assert checks["training.situations"].value == len(exact) > 0
    assert "the loss of stock modules is not finite" in checks["training.situations"].detail
    assert {check.status for check in checks.values()} == {"pass"}


def test_dropouts_are_off_inside_and_as_before_outside():
    model = nn.Sequential(nn.Dropout(0.3), nn.Linear(2, 2))
    model[1].attention_dropout, model[1].factor = 0.5, 0.25
    with without_dropout(model):
        assert (model[0].p, model[1].attention_dropout, model[1].factor) == (0.0, 0.0, 0.25)
    assert (model[0].p, model[1].attention_dropout, model[1].factor) == (0.3, 0.5, 0.25)


def test_a_model_with_dropouts_and_without_a_loss_passes(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=64, max_position_embeddings=64, **sizes)).save_pretrained(tmp_path / "bert")
    patch_checkpoint(tmp_path / "bert", tmp_path / "patched")
    checks = {check.id: check.status for check in verify(tmp_path / "patched", level="training").checks}
    assert checks["training.dropout"] == "pass"
    assert set(checks.values()) == {"pass"}


def test_an_empty_output_is_no_part_of_the_loss() -> None:
    x = torch.ones(3, requires_grad=True)
    loss = loss_of({"hidden": 2 * x, "empty": x[:0]})
    assert torch.equal(loss, loss_of({"hidden": 2 * x}))
    assert loss.isfinite()


def test_a_model_that_generates_from_more_than_tokens_is_compared_after_an_evaluation(patched, monkeypatch):
    def refuse(*args, **kwargs):
        raise ValueError("You must specify exactly one of input_features or encoder_inputs_embeds")

    monkeypatch.setattr(LlamaForCausalLM, "generate", refuse)
    checks = {check.id: check for check in verify(patched, level="training").checks}
    assert checks["training.situations"].value == len(SITUATIONS)
    assert checks["training.evaluation"].status == "pass"


def test_a_model_of_packed_images_is_compared_in_the_size_of_its_own_batch(tmp_path):
    """Its rows cannot be repeated or lengthened one by one."""
    assert saved_twin("lfm3_vl_vision", tmp_path / "model")
    patch_checkpoint(tmp_path / "model", tmp_path / "patched", recipe="exact")
    checks = {check.id: check for check in verify(tmp_path / "patched", level="training").checks}
    assert checks["training.situations"].value == len(SITUATIONS)
    assert "the batch as it is" in checks["training.steps"].detail
    assert {check.status for check in checks.values()} == {"pass"}
