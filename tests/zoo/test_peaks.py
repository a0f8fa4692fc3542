"""Peaks of a step: with how many layers, and what is said where there is none."""

from __future__ import annotations

import pytest
from transformers import PreTrainedConfig

from memopt.errors import ModelError
from tests.zoo import peaks
from tests.zoo.build import Row
from tests.zoo.config import default_config


@pytest.fixture
def traced(monkeypatch) -> list[PreTrainedConfig]:
    """The configs that are traced; the steps of all fail."""
    tried = []

    def fails(config, sites) -> None:
        tried.append(config)
        raise ModelError(f"attempt {len(tried)}")

    monkeypatch.setattr(peaks, "_steps", fails)
    monkeypatch.setattr(peaks, "find_sites", lambda model: None)
    return tried


def test_a_type_that_runs_with_no_few_layers_is_traced_with_more(traced) -> None:
    row = Row("bert", model_class="BertModel")
    peaks.trace_steps(row, default_config("bert"))
    assert [config.num_hidden_layers for config in traced] == [3, 12]
    assert row.notes == ["peak of a step not traced: ModelError: attempt 1"]


def test_a_field_that_only_some_layers_read_is_filled_where_it_is_missed(traced) -> None:
    peaks.trace_steps(Row("deepseek_v2", model_class="DeepseekV2ForCausalLM"), default_config("deepseek_v2"))
    assert [config.num_experts_per_tok for config in traced] == [None, 2, None]
