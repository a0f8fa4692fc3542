"""Models that do not fit into memory: block by block from disk, with the same verdict."""

from __future__ import annotations

import pytest
import torch

import memopt.kernels.norm.ops as norm_steps
import memopt.patches.gated_mlp.module as gated_mlp
import memopt.patches.loss.readers as readers
import memopt.verification.streamed as streamed
from memopt.pipeline import patch_checkpoint
from memopt.verification.run import verify
from tests.factories import tiny_model

pytest.importorskip("accelerate")


@pytest.fixture
def no_memory(monkeypatch):
    monkeypatch.setattr(streamed, "choose_reference", lambda *given, **named: None)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("streamed")
    for name in ("llama", "t5", "bert"):
        tiny_model(name, torch.bfloat16).save_pretrained(root / name)
        patch_checkpoint(root / name, root / f"{name}-patched")
    return root


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_right_folder_passes_block_by_block(folders, no_memory, name):
    verdict = verify(folders / f"{name}-patched", level="gradient")
    assert verdict.status == "pass", [check for check in verdict.checks if check.status != "pass"]
    found = {check.id: check for check in verdict.checks}
    assert found["gradient.modules"].value < 1e-12
    assert "blocks from disk" in found["gradient.modules"].detail
    assert "MiB" in found["gradient.modules"].detail
    assert found["gradient.losses"].subject == "lm_head"


def test_a_fault_in_one_block_fails_by_the_name_of_its_module(folders, no_memory, monkeypatch):
    right = gated_mlp.gated_linear

    def wrong(gate, up, activation, gate_first, weight, bias):
        y = right(gate, up, activation, gate_first, weight, bias)
        return y + 0.01 * (y - y.detach())

    monkeypatch.setattr(gated_mlp, "gated_linear", wrong)
    found = {check.id: check for check in verify(folders / "llama-patched", level="gradient").checks}
    assert found["gradient.modules"].status == "fail"
    assert found["gradient.modules"].subject in ("model.layers.0.mlp", "model.layers.1.mlp")


def test_a_lost_gradient_fails_block_by_block(folders, no_memory, monkeypatch):
    right = norm_steps.norm_backward
    monkeypatch.setattr(norm_steps, "norm_backward", lambda *given: (right(*given)[0], None, None))
    found = {check.id: check for check in verify(folders / "bert-patched", level="gradient").checks}
    assert found["gradient.parameters"].status == "fail"
    assert found["gradient.parameters"].subject.startswith("bert.encoder.layer.")


def test_a_fault_that_only_masked_labels_show_fails(folders, no_memory, monkeypatch):
    monkeypatch.setattr(readers, "weight_of_all", lambda target, arguments, dtype: torch.tensor(float(len(target))))
    found = {check.id: check for check in verify(folders / "llama-patched", level="gradient").checks}
    assert found["gradient.losses"].status == "fail"
    assert {check.status for name, check in found.items() if name != "gradient.losses"} == {"pass"}
