"""Traces of forwards that read values: what they get, and a model that needs it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memopt.reporting.build import compare_training
from memopt.torch_compat import known_values, set_known_values
from memopt.trace.account import account
from memopt.trace.fake import FakeReads, FiniteValues
from memopt.trace.trace import trace_account
from memopt.trace.training import Request, Step, Training
from memopt.walk.models.build import build_meta
from memopt.walk.observe import find_sites
from memopt.walk.sites import Sites


def test_whole_numbers_keep_their_values_and_unknown_ones_are_plausible() -> None:
    grid = torch.tensor([[1, 4, 6]])
    with FakeTensorMode(allow_non_fake_inputs=True), FakeReads():
        assert (2 * grid).tolist() == [[2, 8, 12]]
        assert int(torch.arange(5).max()) == 4
        weights = torch.zeros(7, 3)
        assert isinstance(weights[torch.arange(2)], FakeTensor)
        assert bool((weights > 1).any()) is True
        assert int(weights.long().sum()) == 1


def test_a_mask_with_values_picks_as_many_rows_as_it_has_set() -> None:
    mask = torch.tensor([True, False, True])
    with FakeTensorMode(allow_non_fake_inputs=True), FakeReads():
        hidden = torch.zeros(3, 5)
        assert hidden[mask].shape == (2, 5)
        assert torch.zeros(4, 3)[:, mask].shape == (4, 2)
        hidden[mask] = 1.0


def test_a_mask_without_values_picks_every_element() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), FakeReads():
        hidden = torch.zeros(3, 5, requires_grad=True)
        assert hidden[hidden > 0].shape == (15,)
        assert (hidden > 0).nonzero().tolist() == [[row, column] for row in range(3) for column in range(5)]
        hidden[hidden > 0].sum().backward()
        assert hidden.grad is not None
        assert hidden.grad.shape == (3, 5)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6)])
def test_experts_are_picked_as_often_as_each_other(shape: tuple[int, int]) -> None:
    dim = shape.index(4)
    with FakeTensorMode(allow_non_fake_inputs=True), FakeReads():
        scores = torch.zeros(*shape)
        weights, experts = scores.topk(2, dim=dim)
        assert isinstance(weights, FakeTensor)
        assert experts.shape == weights.shape
        assert experts.flatten().bincount().tolist() == [3, 3, 3, 3]
        assert all(len(set(picked.tolist())) == 2 for picked in experts.movedim(dim, 1))
        assert sorted(scores.argmax(dim).tolist()) == sorted(scores.max(dim).indices.tolist()) == [0, 0, 1, 1, 2, 3]
        assert int(scores.long().max()) == 1


def test_the_tokens_of_each_expert_are_counted_in_zeros_with_a_one_for_each() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), FiniteValues(), FakeReads():
        _, experts = torch.zeros(6, 4).topk(2, dim=1)
        gates = torch.zeros(6, 4, dtype=torch.bfloat16).scatter(1, experts, 1)
        assert isinstance(gates, FakeTensor)
        assert gates.long().sum(0).tolist() == [3, 3, 3, 3]
        changed = torch.zeros(6, 4)
        changed += 1
        assert known_values(changed.scatter(1, experts, 1)) is None


def test_a_model_that_splits_its_tokens_by_their_number_for_each_expert_is_traced() -> None:
    config = transformers.JetMoeConfig(
        hidden_size=32, intermediate_size=24, num_hidden_layers=1, num_key_value_heads=2, kv_channels=8,
        num_local_experts=4, vocab_size=50, max_position_embeddings=64, architectures=["JetMoeForCausalLM"],
    )  # fmt: skip
    sites = find_sites(build_meta(config))
    training = Training(batch=2, seq=10, precision="fp32", dropout=False, cuda_kernels=False)
    counted = trace_account(Step(config, training, sites))
    model = transformers.JetMoeForCausalLM(config).eval()
    ids = torch.arange(20).reshape(2, 10)
    # How many tokens each expert gets changes no sum of bytes.
    real = account(model, lambda: model(ids, labels=ids, use_cache=False), blocks=sites.blocks, sites=sites)
    assert counted.total == real.total


def test_an_additive_mask_of_a_mask_with_values_has_values() -> None:
    mask = torch.tensor([True, False])
    with FakeTensorMode(allow_non_fake_inputs=True), FakeReads():
        additive = torch.where(mask, torch.zeros((), dtype=torch.bfloat16), -8.0)
        assert additive.tolist() == [0.0, -8.0]
        assert not (additive > 0).any()


@pytest.mark.parametrize("reads", [contextlib.nullcontext, FakeReads])
def test_a_branch_on_overflow_is_the_one_of_finite_numbers(reads: Any) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), FiniteValues(), reads():
        hidden = torch.zeros(7, 3, dtype=torch.float16)
        assert not hidden.isinf().any()
        assert not torch.isnan(hidden).any(-1).any()
        assert torch.isfinite(hidden).all()
        assert not (~torch.isfinite(hidden)).any()
        assert hidden.isinf().shape == (7, 3)
        limit = torch.where(hidden.isinf().any(), 1.0, 2.0)
        assert hidden.clamp(min=-limit, max=limit).dtype == torch.float16


@pytest.mark.parametrize("as_tuple", [False, True])
def test_labels_that_are_known_say_how_many_count(as_tuple: bool) -> None:
    values = torch.tensor([0, -100, 2, -100])
    with FakeTensorMode(allow_non_fake_inputs=True), FiniteValues():
        labels = torch.zeros(4, dtype=torch.int64)
        set_known_values(labels, values)
        positions = (labels >= 0).nonzero(as_tuple=as_tuple)
        (rows,) = positions if as_tuple else (positions.view(-1),)
        assert isinstance(rows, FakeTensor)
        assert rows.shape == (2,)
        known = known_values(rows)
    assert known is not None
    assert known.tolist() == [0, 2]


def test_a_classifier_that_looks_for_its_labels_is_traced() -> None:
    config = transformers.DebertaV2Config(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=50,
        architectures=["DebertaV2ForSequenceClassification"],
    )  # fmt: skip
    blocks = Sites(
        "DebertaV2ForSequenceClassification", "deberta-v2", blocks=("deberta.encoder.layer.0",), hidden_size=16
    )
    counted = trace_account(Step(config, Training(batch=4, seq=10), blocks))
    # Its loss computes the rows of labels that count, here all, in fp32.
    assert (4, 2) in [kept.shape for kept in counted.storages if kept.dtype == "float32" and kept.part == "head"]


@pytest.mark.parametrize("given", [False, True])
def test_a_clamp_in_case_of_overflow_is_traced_as_not_taken(given: bool) -> None:
    few = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.BartConfig(
        **few, d_model=16, encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=50, max_position_embeddings=32,
        architectures=["BartForConditionalGeneration"],
    )  # fmt: skip
    blocks = Sites("BartForConditionalGeneration", "bart", blocks=("model.encoder.layers.0",), hidden_size=16)
    ids = torch.arange(20).reshape(2, 10) + 3
    batch = {"input_ids": ids, "labels": ids} if given else None
    training = Training(batch=2, seq=10, precision="fp16")
    counted = trace_account(Step(config, training, blocks, inputs=batch))
    assert counted.total > 0
    assert not any(operation == "clamp" for kept in counted.storages for _, operation in kept.savers)


def test_a_model_that_counts_its_placeholders_is_traced_with_a_batch(tmp_path: Path) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**shape, vocab_size=90),
        vision_config=transformers.CLIPVisionConfig(**{**shape, "num_hidden_layers": 2}, image_size=16, patch_size=8),
        image_token_id=80,
        image_seq_length=4,
    )
    config.save_pretrained(tmp_path)
    ids = torch.arange(20).reshape(2, 10)
    ids[:, 2:6] = 80
    batch = {"input_ids": ids, "pixel_values": torch.ones(2, 3, 16, 16), "labels": ids}
    comparison = compare_training(Request(tmp_path, inputs=batch))
    assert (comparison.training.batch, comparison.training.seq) == (2, 10)
    assert any("vision_tower" in kept.savers[0][0] for kept in comparison.before.storages)
    assert comparison.change < 0
