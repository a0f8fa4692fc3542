"""Faults in single modules, too small for the rounding of 16 bits to show, fail by the name of the module."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import memopt.kernels.norm.ops as norm_steps
import memopt.patches.gated_mlp.module as gated_mlp
import memopt.patches.norm.module as norm_module
import memopt.verification.models as models
from memopt.patches.checks import Check
from memopt.pipeline import patch_checkpoint
from memopt.recompute.specs import Recomputed
from memopt.verification.run import verify
from tests.factories import tiny_model


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def folders(request, tmp_path_factory) -> Callable[[str], Path]:
    """The patched folder of a family; not to be written to."""
    root = tmp_path_factory.mktemp("modules")

    def folder(name: str) -> Path:
        if not (root / f"{name}-patched").exists():
            tiny_model(name, request.param).save_pretrained(root / name)
            patch_checkpoint(root / name, root / f"{name}-patched")
        return root / f"{name}-patched"

    return folder


def failed(folder: Path) -> dict[str, Check]:
    return {check.id: check for check in verify(folder, level="gradient").checks if check.status == "fail"}


def test_a_norm_that_gives_its_weight_no_gradient_fails_by_name(folders, monkeypatch):
    right = norm_steps.norm_backward
    monkeypatch.setattr(norm_steps, "norm_backward", lambda *given: (right(*given)[0], None, right(*given)[2]))
    check = failed(folders("bert"))["gradient.parameters"]
    assert check.subject == "bert.embeddings.LayerNorm.weight"
    assert check.value == 5  # of two blocks and the embeddings


def test_a_gradient_of_a_norm_weight_that_is_off_by_a_percent_fails_by_name(folders, monkeypatch):
    right = norm_steps.norm_backward

    def wrong(*given):
        dx, dweight, dbias = right(*given)
        return dx, None if dweight is None else 1.01 * dweight, dbias

    monkeypatch.setattr(norm_steps, "norm_backward", wrong)
    found = failed(folders("bert"))
    assert found["gradient.modules"].subject == "bert.embeddings.LayerNorm"
    assert found["gradient.alone"].subject.endswith("LayerNorm")
    assert found["gradient.alone"].value == pytest.approx(0.01, rel=1e-3)


def test_an_epsilon_that_is_off_by_a_percent_fails_by_name(folders, monkeypatch):
    right = norm_module.NormSpec
    monkeypatch.setattr(norm_module, "_prove", lambda *given: None)  # which refuses it in fp32
    monkeypatch.setattr(
        norm_module, "NormSpec", lambda **fields: dataclasses.replace(right(**fields), eps=fields["eps"] * 1.01)
    )
    assert failed(folders("bert"))["gradient.alone"].subject.endswith("LayerNorm")
    (alone,) = (check for check in verify(folders("llama"), level="gradient").checks if check.id == "gradient.alone")
    assert (alone.status, alone.n) == ("fail", 5)  # two blocks of two norms, and the last one


def test_a_gradient_that_one_gated_mlp_scales_fails_by_its_name(folders, monkeypatch):
    right, seen = gated_mlp._run, []

    def wrong(rewrite, children, down, x):
        y = right(rewrite, children, down, x)
        if not any(each is children for each in seen):  # kept alive: another model's would get the same id
            seen.append(children)
        place = next(place for place, each in enumerate(seen) if each is children)
        # The gradient of the second block's is scaled, its value is not.
        return y + 0.01 * (y - y.detach()) if place % 2 else y

    monkeypatch.setattr(gated_mlp, "_run", wrong)
    assert failed(folders("llama"))["gradient.modules"].subject == "model.layers.1.mlp"


def test_an_input_that_is_recomputed_a_little_wrong_fails(folders, monkeypatch):
    right = Recomputed.rows
    monkeypatch.setattr(Recomputed, "rows", lambda *given: 1.001 * right(*given))
    found = failed(folders("bert"))["gradient.modules"]
    assert 1e-4 < found.value < 2e-3
    assert found.subject.endswith(("query", "key", "value", "dense"))


def test_a_dropout_that_is_left_on_fails_by_name(folders, monkeypatch):
    right = models.load

    def load(*given, **options) -> nn.Module:
        model = right(*given, **options)
        dropout = model.get_submodule("bert.encoder.layer.1.output.dropout")
        dropout.p, dropout.training, dropout.train = 0.1, True, lambda mode: dropout
        return model

    monkeypatch.setattr(models, "load", load)
    assert "bert.encoder.layer.1.output" in failed(folders("bert"))["gradient.modules"].subject


def test_an_output_that_the_patched_model_loses_fails_by_name(folders, monkeypatch):
    right = models.load

    def load(*given, **options) -> nn.Module:
        model = right(*given, **options)
        model.register_forward_hook(lambda *given: {name: each for name, each in given[-1].items() if name != "logits"})
        return model

    monkeypatch.setattr(models, "load", load)
    found = {c.id: c for c in verify(folders("llama"), level=["forward", "gradient"]).checks if c.status == "fail"}
    assert found["forward.outputs"].subject == "logits"
    assert found["gradient.modules"].detail == "most in the output logits, which only one of them has"
