"""A walk is remembered for a model that it cannot tell from another, and for no other model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.factories import tiny_config, tiny_model
from tests.support.walks import Unknown, Walks, fingerprint


def test_weights_do_not_matter_and_where_a_model_came_from_neither() -> None:
    model, other = tiny_model("llama", seed=0), tiny_model("llama", seed=1)
    other.config._name_or_path = "elsewhere"
    assert fingerprint(model) == fingerprint(other) == fingerprint(copy.deepcopy(model))


def changed(what: str) -> nn.Module:
    model = tiny_model("llama", num_hidden_layers=2)
    if what == "dtype":
        return model.half()
    if what == "mode":
        return model.eval()
    if what == "a module's mode":
        model.model.layers[1].mlp.eval()
    elif what == "a frozen weight":
        model.model.norm.weight.requires_grad_(False)
    elif what == "an attribute":
        model.model.norm.variance_epsilon = 1e-3
    elif what == "another activation":
        model.model.layers[0].mlp.act_fn = nn.GELU()
    elif what == "a tie":
        model.lm_head.weight = model.model.embed_tokens.weight
    elif what == "a setting":
        model.config._attn_implementation = "eager"
    return model


CHANGES = (
    "dtype", "mode", "a module's mode", "a frozen weight", "an attribute", "another activation", "a tie", "a setting"
)  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_what_a_walk_can_read_matters(what: str) -> None:
    assert fingerprint(changed(what)) != fingerprint(changed("nothing"))


def test_hooks_own_forwards_and_classes_of_a_test_are_not_remembered() -> None:
    hooked, own = tiny_model("llama"), tiny_model("llama")
    hooked.model.norm.register_forward_hook(lambda *_: None)
    own.model.norm.forward = lambda x: x

    class Mine(nn.Linear):
        pass

    for model in (hooked, own, nn.Sequential(Mine(2, 2))):
        with pytest.raises(Unknown):
            fingerprint(model)


def test_the_second_walk_of_a_run_is_read_in_another_process_too(tmp_path: Path) -> None:
    walked: list[Any] = []

    def walk(config: Any, *, deep: bool = False) -> tuple[str, bool]:
        walked.append(config)
        return config.model_type, deep

    for _ in range(2):  # another object knows only the folder, as another process does
        walks = Walks(tmp_path)
        walks.enabled = True
        once = walks.remembered(walk)
        assert once(tiny_config("llama")) == once(tiny_config("llama")) == ("llama", False)
        assert once(tiny_config("llama"), deep=True) == ("llama", True)
        assert once(tiny_config("gpt2")) == ("gpt2", False)
    assert len(walked) == 3
    walks.enabled = False
    once(tiny_config("llama"))
    assert len(walked) == 4
