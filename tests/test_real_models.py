"""Pretrained weights: trained norms and outlier channels are where folds and roundings break."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import transformers

import memopt
from memopt.checkpoint.manifest import read_manifest
from memopt.pipeline import patch_checkpoint
from memopt.trace.account import account
from memopt.verification.run import verify

QUESTION = "The capital of France is"


@pytest.fixture(scope="module")
def patched_smollm2(smollm2, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("real") / "smollm2"
    return patch_checkpoint(smollm2, folder).out


@pytest.fixture(scope="module")
def patched_minilm(minilm, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("real") / "minilm"
    return patch_checkpoint(minilm, folder).out


@pytest.mark.rotates(4)
def test_the_first_blocks_of_a_post_norm_encoder_pass_every_level(minilm, tmp_path):
    transformers.AutoModel.from_pretrained(minilm, num_hidden_layers=2).save_pretrained(tmp_path / "stock")
    verdict = verify(patch_checkpoint(tmp_path / "stock", tmp_path / "patched").out)
    assert verdict.status == "pass", [check for check in verdict.checks if check.status != "pass"]


@pytest.mark.slow
def test_a_post_norm_encoder_passes_every_level(patched_minilm):
    verdict = verify(patched_minilm)
    assert verdict.status == "pass", [check for check in verdict.checks if check.status != "pass"]


def test_no_norm_of_a_post_norm_encoder_is_folded(patched_minilm):
    assert read_manifest(patched_minilm).folded_norms() == frozenset()


@pytest.mark.rotates(4)
def test_a_decoder_has_all_its_block_norms_folded_bit_by_bit(patched_smollm2):
    assert len(read_manifest(patched_smollm2).folded_norms()) == 60
    verdict = verify(patched_smollm2, level="weights")
    assert verdict.status == "pass", [check for check in verdict.checks if check.status != "pass"]


@pytest.mark.slow
def test_a_decoder_passes_every_level(patched_smollm2):
    verdict = verify(patched_smollm2, level=["forward", "gradient", "memory"])
    assert verdict.status == "pass", [check for check in verdict.checks if check.status != "pass"]


@pytest.mark.parametrize("loader", ["stock", "memopt"])
def test_a_patched_decoder_still_answers_with_the_capital_of_france(patched_smollm2, loader):
    tokenizer = transformers.AutoTokenizer.from_pretrained(patched_smollm2)
    if loader == "stock":
        model = transformers.AutoModelForCausalLM.from_pretrained(patched_smollm2)
    else:
        model = memopt.load(patched_smollm2)
    ids = tokenizer(QUESTION, return_tensors="pt")
    answer = tokenizer.decode(model.eval().generate(**ids, max_new_tokens=8, do_sample=False)[0])
    assert "Paris" in answer


def test_the_similarity_of_sentences_does_not_change(minilm, patched_minilm):
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    texts = ["A man is playing a guitar.", "Someone plays the guitar.", "The stock market fell today."]
    batch = tokenizer(texts, return_tensors="pt", padding=True)

    def similarities(model: torch.nn.Module) -> torch.Tensor:
        mask = batch["attention_mask"][..., None]
        mean = (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
        unit = torch.nn.functional.normalize(mean, dim=-1)
        return unit @ unit.T

    stock = transformers.AutoModel.from_pretrained(minilm).eval()
    # Gradients on: the patched modules take their own path.
    torch.testing.assert_close(similarities(memopt.load(patched_minilm).eval()), similarities(stock))
    assert similarities(stock)[0, 1] > 0.6 > similarities(stock)[0, 2]


def test_patching_in_memory_saves_at_real_width(minilm):
    model = transformers.AutoModelForSequenceClassification.from_pretrained(minilm, num_labels=2).eval()
    inputs = {"input_ids": torch.randint(1000, 20000, (2, 64)), "labels": torch.tensor([0, 1])}
    before = account(model, lambda: model(**inputs).loss).saved
    patched = memopt.patch(copy.deepcopy(model))
    assert account(patched, lambda: patched(**inputs).loss).saved < 0.65 * before
