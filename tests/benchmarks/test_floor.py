"""The floor of a block is what its products, attention and kernels need, counted by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig

from benchmarks.floor import Floor, Recorder, cheapest, floor_of
from memopt.trace.training import Step, Training
from memopt.walk.observe import walk_config

TOKENS, HIDDEN, MLP, HEADS, BF16, FP32 = 256, 64, 96, 4, 2, 4
UNIT = TOKENS * HIDDEN * BF16
ROWS_OF_HEADS = TOKENS * HEADS * FP32
SEED_AND_OFFSET = 3 * 8


def config(model_type: str, architecture: str, layers: int, **fields: Any) -> PreTrainedConfig:
    found = AutoConfig.for_model(
        model_type, hidden_size=HIDDEN, intermediate_size=MLP, num_attention_heads=HEADS, num_hidden_layers=layers,
        vocab_size=128, **fields,
    )  # fmt: skip
    found.architectures = [architecture]
    found.use_cache = False
    return found


def a_layer(model_type: str, architecture: str, **fields: Any) -> int:
    """The floor of three layers, less that of two."""
    floors = []
    for layers in (2, 3):
        of = config(model_type, architecture, layers, **fields)
        floors.append(floor_of(Step(of, Training(batch=2, seq=TOKENS // 2, dropout=False), walk_config(of))).nbytes)
    return floors[1] - floors[0]


def test_a_llama_layer_keeps_its_sums_the_operands_of_attention_and_gate_and_up() -> None:
    sums, attention, gate_and_up = 2 * UNIT, (2 + 2 / 2) * UNIT, 2 * MLP * TOKENS * BF16
    found = a_layer("llama", "LlamaForCausalLM", num_key_value_heads=HEADS // 2)
    assert found == sums + attention + gate_and_up + ROWS_OF_HEADS + SEED_AND_OFFSET


def test_a_bert_layer_keeps_its_sums_the_operands_of_attention_and_what_the_activation_reads() -> None:
    sums, attention, activation = 2 * UNIT, 4 * UNIT, MLP * TOKENS * BF16
    assert a_layer("bert", "BertForMaskedLM") == sums + attention + activation + ROWS_OF_HEADS + SEED_AND_OFFSET


def test_norms_behind_a_product_keep_the_product_and_the_sum_follows_from_it() -> None:
    sum_and_products, attention, gate_and_up = 3 * UNIT, 4 * UNIT, 2 * MLP * TOKENS * BF16
    found = a_layer(
        "gemma2", "Gemma2ForCausalLM", num_key_value_heads=HEADS, head_dim=HIDDEN // HEADS, attn_logit_softcapping=None
    )
    without_statistics = sum_and_products + attention + gate_and_up
    assert without_statistics <= found <= without_statistics + ROWS_OF_HEADS + SEED_AND_OFFSET


def test_experts_keep_gate_and_up_and_not_what_the_router_scales() -> None:
    experts, chosen, width = 8, 2, 32
    found = a_layer(
        "qwen3_moe", "Qwen3MoeForCausalLM", num_key_value_heads=HEADS, head_dim=HIDDEN // HEADS, num_experts=experts,
        num_experts_per_tok=chosen, moe_intermediate_size=width,
    )  # fmt: skip
    gate_and_up, router = 2 * width * chosen * TOKENS * BF16, experts * TOKENS * BF16
    assert found == 6 * UNIT + gate_and_up + router + ROWS_OF_HEADS + SEED_AND_OFFSET


class _Of(nn.Module):
    """A module that runs `forward` on two weights."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        self.run = run
        self.first, self.second = (nn.Parameter(torch.randn(8, 8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.run(x, self.first, self.second)
        return found


def floor(run: Any) -> Floor:
    model, x = _Of(run), torch.randn(16, 8)
    recorder = Recorder(model, (), [x])
    with recorder.watching():
        model(x)
    return cheapest(recorder)


MATRIX = 16 * 8 * FP32
PROGRAMS = {
    "an input costs nothing": (lambda x, a, b: x.sin() @ a, 0),
    "an activation is computed from its input": (lambda x, a, b: F.gelu(x @ a) @ b, MATRIX),
    "a sum of two products is kept as one": (lambda x, a, b: (x @ a + x.cos() @ b).sin().exp() @ a, MATRIX),
    "a sum whose summands are needed is not kept": (
        lambda x, a, b: ((y := x @ a).sin() + (z := x @ b).cos()) @ a + y.exp() + z.exp(),
        2 * MATRIX,
    ),
    "a smaller cast is kept in place of what it was made of": (
        lambda x, a, b: (y := (x @ a).half()).sin().float() @ b + y.cos().float(),
        MATRIX // 2,
    ),
    "a change in place is another value": (lambda x, a, b: (x @ a).mul_(2).sin() @ b, MATRIX),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_cheapest_choice_is_found(name: str) -> None:
    run, expected = PROGRAMS[name]
    assert floor(run).nbytes == expected


def test_probabilities_are_computed_from_queries_and_keys_and_other_products_of_activations_are_kept() -> None:
    def attention(x: Tensor, a: Tensor, b: Tensor, *, softmax: bool) -> Tensor:
        q, k = (x @ a).view(2, 8, 8), (x @ b).view(2, 8, 8)
        scores = torch.bmm(q, k.mT)
        return (scores.softmax(-1) if softmax else scores.sin()).exp()

    q_and_k, scores = 2 * MATRIX, 2 * 8 * 8 * FP32
    assert floor(lambda *of: attention(*of, softmax=True)).nbytes == q_and_k
    assert floor(lambda *of: attention(*of, softmax=False)).nbytes == q_and_k + scores
