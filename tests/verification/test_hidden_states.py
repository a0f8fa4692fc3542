"""Folds that change a hidden state and nothing else: kept by default, folded on demand, verified end to end."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from memopt.checkpoint.manifest import read_manifest
from memopt.pipeline import patch_checkpoint
from memopt.verification.run import verify
from tests.factories import tiny_model

#: Family -> (norm with a caution, fields of the output that its fold changes).
CAUTIONED = {
    "llama": ("model.norm", ()),
    "t5": ("encoder.final_layer_norm", ("encoder_last_hidden_state",)),
    "bert": ("bert.encoder.layer.1.output.LayerNorm", ()),
    "whisper": ("model.encoder.layer_norm", ("encoder_last_hidden_state",)),
}


def small_model(name: str) -> transformers.PreTrainedModel:
    if name != "whisper":
        return tiny_model(name, torch.float32)
    width = {"d_model": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_mel_bins": 8}
    depth = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    sizes = {"vocab_size": 67, "max_source_positions": 30, "max_target_positions": 40}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(**width, **depth, **sizes, **tokens, suppress_tokens=[], begin_suppress_tokens=[])
    )
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    return model


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("hidden_states")
    for name in CAUTIONED:
        small_model(name).save_pretrained(root / name)
    return root


def patch(folder: Path, out: Path, *settings: str) -> None:
    patch_checkpoint(folder, out, overrides=settings)


@pytest.fixture(scope="module")
def changed_folders(originals) -> Callable[[str], Path]:
    """The folder of a family, patched once with hidden states that may change; not to be written to."""

    @functools.cache
    def changed(name: str) -> Path:
        patch(originals / name, originals / f"{name}-changed", "norms.hidden_states=change")
        return originals / f"{name}-changed"

    return changed


@pytest.mark.parametrize("name", CAUTIONED)
def test_a_norm_with_a_caution_is_folded_on_demand_only(originals, changed_folders, name, tmp_path):
    norm, changed = CAUTIONED[name]
    patch(originals / name, tmp_path / "kept")
    kept, folded = read_manifest(tmp_path / "kept"), read_manifest(changed_folders(name))
    assert folded.folded_norms() - kept.folded_norms() == {norm}
    assert (kept.changed_outputs, folded.changed_outputs) == ((), changed)
    (reason,) = (entry.reason for entry in kept.entries if entry.site == norm)
    assert reason.startswith("not folded: ")
    assert reason.endswith("`--set norms.hidden_states=change` folds it")


@pytest.mark.parametrize("name", CAUTIONED)
@pytest.mark.rotates(4)
def test_what_it_changes_is_listed_and_everything_else_is_verified(changed_folders, name):
    norm, changed = CAUTIONED[name]
    verdict = verify(changed_folders(name))
    assert verdict.status == "pass", [check for check in verdict.checks if check.status != "pass"]
    listed = [check for check in verdict.checks if check.id == "forward.changed_output"]
    assert tuple(check.subject.partition(",")[0] for check in listed) == changed
    assert all(check.value is not None and check.value > 1e-3 for check in listed)
    assert any(check.id == "forward.error_ratio" and check.subject.startswith("logits") for check in verdict.checks)
    weights = load_file(changed_folders(name) / "model.safetensors")
    assert (weights[f"{norm}.weight"] == 1).all()


def test_an_output_that_changes_without_leave_fails(changed_folders, tmp_path):
    shutil.copytree(changed_folders("t5"), tmp_path / "out")
    path = tmp_path / "out" / "memopt.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"changed_outputs": []}))
    failed = [check.subject for check in verify(tmp_path / "out", level="forward").checks if check.status == "fail"]
    assert any("encoder_last_hidden_state" in subject for subject in failed)
