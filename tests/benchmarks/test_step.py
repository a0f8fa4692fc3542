"""`python -m benchmarks.step`: real and fake tensors agree, and the yardstick computes the loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

import memopt
from benchmarks import step as benchmark
from benchmarks.step import Case, Row, measure, misses


def _tiny() -> transformers.PreTrainedConfig:
    return transformers.LlamaConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512, tie_word_embeddings=True,
    )  # fmt: skip


CASE = Case("tiny", _tiny, transformers.AutoModelForCausalLM, batch=2, seq=32, folder="tiny")
#: The patched loss leaves masked rows out, which a batch without values does not show.
RECIPE = memopt.load_recipe("exact-unfolded", ["loss.method=none"])


@pytest.mark.parametrize("variant", ["memopt", "memopt + ck", "ck + cc"])
def test_fake_tensors_peak_where_real_ones_do(
    variant: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = tmp_path_factory.mktemp("models")
    transformers.LlamaForCausalLM(_tiny()).save_pretrained(models / "tiny")
    monkeypatch.setattr(benchmark, "MODELS", models)
    real, fake = (measure(CASE, "full", variant, recipe=RECIPE, fake=fake) for fake in (False, True))
    # A device's attention kernel also keeps its seeds: a few 8-byte numbers a layer.
    assert (fake.kept, fake.peak) == pytest.approx((real.kept, real.peak), abs=64 * _tiny().num_hidden_layers)


@pytest.mark.slow
def test_checkpointing_of_a_pretrained_classifier_peaks_no_higher_with_memopt(
    minilm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "MODELS", minilm.parent)
    case = next(each for each in benchmark.CASES if "classifier" in each.name)
    rows = [measure(case, "full", variant, recipe=RECIPE, fake=False) for variant in ("ck", "memopt + ck")]
    assert misses(rows) == []


def test_adapters_in_fp32_raise_the_peak_of_a_checkpointed_step_by_a_piece_at_most() -> None:
    """A tenth of the last linear's input in fp32 at most, and the rows of their rank that adapters save."""

    def config() -> transformers.PreTrainedConfig:
        return transformers.LlamaConfig(
            hidden_size=1024, intermediate_size=8192, num_hidden_layers=1, num_attention_heads=16,
            num_key_value_heads=4, vocab_size=2048, tie_word_embeddings=True,
        )  # fmt: skip

    case = Case("wide", config, transformers.AutoModelForCausalLM, batch=1, seq=4096)
    full, lora = (measure(case, trained, "memopt + ck", recipe=RECIPE).peak for trained in benchmark.TRAINED)
    gate, piece, saved = 4096 * 8192 * 2, 4096 * 8192 * 4 // 10, 7 * 4096 * 8 * 4
    assert full < lora <= full + piece + saved < full + gate


def test_the_yardstick_is_the_loss_and_its_gradients() -> None:
    stock, chunked = (transformers.LlamaForCausalLM(_tiny()).double() for _ in range(2))
    chunked.load_state_dict(stock.state_dict())
    benchmark.chunk_loss(chunked)
    ids = torch.randint(0, 512, (2, 32))
    for model in (stock, chunked):
        model(input_ids=ids, labels=ids).loss.backward()
    for one, other in zip(stock.parameters(), chunked.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=2e-5, atol=1e-7)  # logits are cast to fp32


def test_a_peak_above_its_limit_and_one_above_checkpointing_alone_fall_short() -> None:
    name, limit = "SmolLM2-135M, 4 x 512", 780
    rows = [
        Row(name, "full", variant, False, 0, int(mib * benchmark.MIB), 0, 0)
        for variant, mib in (("memopt", limit + 1), ("ck", 100), ("memopt + ck", 101))
    ]
    assert len(misses(rows)) == 2
    mib = benchmark.MIB
    exact, coded = (Row(name, "full", variant, False, 300 * mib, 0, 0, 0) for variant in ("memopt", "int8"))
    assert misses([exact, replace(coded, kept=100 * mib, peak=119 * mib)]) == []  # 110 and a thirtieth of 300
    assert len(misses([exact, replace(coded, kept=100 * mib, peak=121 * mib)])) == 1
    large = "Llama-3-8B shape, 1 x 8192"
    assert len(misses([Row(large, "full", "memopt", False, 0, 100 * mib, 3 * mib, 0)])) == 1
    assert misses([rows[1]]) == []
