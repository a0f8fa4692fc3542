"""A model whose kernels are installed is walked and traced by plain functions, and trains with the kernels."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

import memopt
from memopt.trace.estimate import traced
from memopt.trace.kernels import STAND_INS, notes_of
from memopt.trace.training import Step, Training
from memopt.walk.models.build import build_meta
from memopt.walk.models.plain import kernels_of, plain_functions
from memopt.walk.observe import walk_config

RULE = "torch_chunk_gated_delta_rule"


def _config() -> PretrainedConfig:
    return AutoConfig.for_model(
        "qwen3_5_text", architectures=["Qwen3_5ForCausalLM"], hidden_size=64, intermediate_size=96, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=1, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=16, linear_value_head_dim=16, vocab_size=128, max_position_embeddings=256,
    )  # fmt: skip


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The delta rule is a kernel that runs on CUDA alone, as with flash-linear-attention: the devices of its calls."""
    plain = inspect.unwrap(getattr(modeling_qwen3_5, RULE))
    called: list[str] = []

    def chunk_gated_delta_rule(query: Tensor, *given: Any, **options: Any) -> Any:
        called.append(query.device.type)
        raise RuntimeError("0 active drivers ([]). There should only be one.")

    wrapped = modeling_qwen3_5.use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", "fla")(plain)
    cells = dict(zip(wrapped.__code__.co_freevars, wrapped.__closure__ or (), strict=True))
    monkeypatch.setattr(cells["implementation"], "cell_contents", chunk_gated_delta_rule)
    monkeypatch.setattr(cells["is_new_implementation"], "cell_contents", True)
    monkeypatch.setattr(modeling_qwen3_5, RULE, wrapped)
    return called


@pytest.mark.rotates(3)
def test_the_sites_are_those_without_the_kernel(installed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config()
    with monkeypatch.context() as without:
        without.setattr(modeling_qwen3_5, RULE, inspect.unwrap(getattr(modeling_qwen3_5, RULE)))
        expected = walk_config(config)
    assert len(expected.gated_mlps) == config.num_hidden_layers
    assert walk_config(config) == expected
    assert not installed


def test_training_runs_the_kernel(installed: list[str]) -> None:
    model = AutoModelForCausalLM.from_config(_config()).train()
    assert kernels_of(model)["chunk_gated_delta_rule"] == "fla"
    memopt.patch(model)
    assert not installed
    ids = torch.zeros(1, 8, dtype=torch.long)
    with pytest.raises(RuntimeError, match="active drivers"):
        model(input_ids=ids, labels=ids)
    assert installed == ["cpu"]
    with plain_functions(model):
        model(input_ids=ids, labels=ids).loss.backward()


@pytest.mark.rotates(3)
def test_a_trace_assumes_the_kernel_and_says_so(installed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config()
    sites = walk_config(config)
    of = Step(config, Training(batch=2, seq=128), sites)
    saved: list[int] = []
    stand_in = STAND_INS["chunk_gated_delta_rule"]

    def counting(query: Tensor, *given: Any, **options: Any) -> Any:
        def pack(tensor: Tensor) -> Tensor:
            saved.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return stand_in(query, *given, **options)

    monkeypatch.setattr("memopt.trace.estimate.STAND_INS", {"chunk_gated_delta_rule": counting})
    with traced(of) as model:
        loss = model.run().loss
        with model.choices():
            loss.backward()
        (note,) = (note for note in model.notes if "flash-linear-attention" in note)
    assert note.startswith("Assumes flash-linear-attention for chunk_gated_delta_rule")
    linear = config.layer_types.count("linear_attention")
    tokens, heads = 2 * 128, config.linear_num_value_heads
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    # Normalised q and k, v, A of 64 numbers a head in 16 bits; two roots, g in fp32, beta in 16 bits.
    values = heads * config.linear_value_head_dim
    a_token = 2 * (2 * keys + values + 64 * heads) + 4 * (2 * config.linear_num_key_heads + heads) + 2 * heads
    assert sum(saved) == linear * tokens * a_token
    assert not installed


def test_a_function_without_its_package_is_the_plain_one() -> None:
    model = build_meta(_config())
    before = getattr(modeling_qwen3_5, RULE)
    assert kernels_of(model) == {}
    assert notes_of(model) == []
    with plain_functions(model, {"chunk_gated_delta_rule": pytest.fail}):
        assert getattr(modeling_qwen3_5, RULE) is before.__wrapped__
    assert getattr(modeling_qwen3_5, RULE) is before


def test_the_scan_saves_its_result() -> None:
    x = torch.ones(1, 128, 2, 4, requires_grad=True)
    dt, A, B, C = torch.ones(1, 128, 2), torch.ones(2), torch.ones(1, 128, 1, 8), torch.ones(1, 128, 1, 8)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        result = STAND_INS["mamba_chunk_scan_combined"](x, dt, A, B, C, 64)
    assert [each.data_ptr() for each in saved].count(result.data_ptr()) == 1
    sums = (1, 2, 2, 64)
    assert sorted(each.shape for each in saved) == sorted([x.shape, dt.shape, A.shape, B.shape, C.shape, sums, x.shape])
