"""A large part of a model that no call reaches is said, with the reason and the remedy."""

from __future__ import annotations

import pytest
import torch
from peft import LoHaConfig, LoraConfig, get_peft_model
from torch import Tensor, nn

import memopt
from memopt.errors import NegativeVerdict
from memopt.walk.observe import walk_model
from tests.factories import NAMES, tiny_model


class Towers(nn.Module):
    """Runs one of two towers, as what it is given says."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.text = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16))
        self.sound = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.fails = fails

    def forward(self, hidden_states: Tensor, sound: Tensor | None = None) -> Tensor:
        if self.fails and sound is None:
            raise ValueError("sound is missing")
        y: Tensor = self.text(hidden_states) if sound is None else self.sound(sound)
        return y


GIVEN = {"hidden_states": torch.randn(2, 6, 16)}


def test_a_tower_that_no_call_reached_is_warned_of_and_in_the_summary() -> None:
    model = Towers()
    with pytest.warns(UserWarning, match=r"not seen all of this model: .* reached 3 modules with 6\d%"):
        memopt.patch(model, inputs=GIVEN)
    assert "not seen: no call of the walk reached 3 modules" in str(memopt.summary(model))
    assert "'sound.0' (the inputs that were tried do not lead there)" in str(memopt.summary(model))


def test_with_inputs_for_the_large_tower_the_small_one_alone_is_said() -> None:
    unseen = walk_model(Towers(), {**GIVEN, "sound": torch.randn(2, 6, 16)}).unseen
    assert "3 modules" in unseen
    assert "'text.0'" in unseen


@pytest.mark.filterwarnings("ignore:memopt could observe little")
def test_nothing_is_patched_is_not_said_where_nothing_was_tried() -> None:
    class Blind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("weather is missing")

    with pytest.raises(NegativeVerdict, match="could not run this model"):
        memopt.patch(Blind())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.rotates(3)
def test_models_that_are_seen_whole_say_nothing(name: str) -> None:
    assert not walk_model(tiny_model(name)).unseen


ADAPTED = {
    "copies of head and embedding": LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"]),
    "copies of whole modules": LoraConfig(target_modules=["q_proj"], modules_to_save=["mlp"]),
    "single tokens": LoraConfig(target_modules=["q_proj"], trainable_token_indices=[3, 4]),
    "weights in a dictionary": LoHaConfig(r=2, target_modules=["q_proj", "down_proj", "up_proj"]),
}


@pytest.mark.parametrize("name", ADAPTED)
def test_weights_that_adapters_read_or_replace_are_seen(name: str) -> None:
    assert not walk_model(get_peft_model(tiny_model("llama", vocab_size=2000), ADAPTED[name])).unseen


def test_a_frozen_tower_is_not_taken_for_a_copy() -> None:
    model = Towers()
    model.sound.requires_grad_(False)
    assert "3 modules" in walk_model(model, GIVEN).unseen
