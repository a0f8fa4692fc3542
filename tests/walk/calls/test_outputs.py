"""Which fields of an output are what a model is for."""

from __future__ import annotations

import pytest
import torch

from memopt.walk.calls.outputs import auxiliary_fields


@pytest.mark.parametrize(
    ("fields", "auxiliary"),
    [
        (["logits", "past_key_values"], set()),
        (["logits", "encoder_last_hidden_state"], {"encoder_last_hidden_state"}),
        (["logits", "image_hidden_states"], {"image_hidden_states"}),
        (["start_logits", "end_logits", "hidden_states"], {"hidden_states"}),
        (["last_hidden_state", "pooler_output"], set()),
        (["last_hidden_state", "encoder_last_hidden_state"], {"encoder_last_hidden_state"}),
        (["predicted_depth", "hidden_states"], set()),
    ],
)
def test_hidden_states_are_auxiliary_beside_what_is_made_of_them(fields: list[str], auxiliary: set[str]) -> None:
    assert auxiliary_fields({field: torch.ones(1) for field in fields}) == auxiliary


def test_the_output_of_an_inner_model_is_auxiliary_beside_logits() -> None:
    inner = {"last_hidden_state": torch.ones(1)}
    assert auxiliary_fields({"logits_per_image": torch.ones(1), "vision_model_output": inner}) == {
        "vision_model_output"
    }


def test_a_bare_tensor_is_what_the_model_is_for() -> None:
    assert auxiliary_fields(torch.ones(1)) == frozenset()
