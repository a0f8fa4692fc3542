"""A walk is remembered for a model that it cannot tell from another, and for no other model."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomllib
from torch import nn

from memopt.patches import apply
from memopt.walk.flow.shadow import ShadowMode
from memopt.walk.folds import verdict
from tests.factories import tiny_config, tiny_model
from tests.support.walks import ABOVE, Unknown, Walks, fingerprint, folder_of_sources

ROOT = Path(__file__).parents[2]


def test_weights_do_not_matter_and_where_a_model_came_from_neither() -> None:
    model, other = tiny_model("llama", seed=0), tiny_model("llama", seed=1)
    other.config._name_or_path = "elsewhere"
    other.generation_config._original_object_hash = 1  # a salted hash: another one in each process
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


def counting_walk() -> tuple[Callable[..., tuple[str, bool]], list[Any]]:
    walked: list[Any] = []

    def walk(config: Any, *, deep: bool = False) -> tuple[str, bool]:
        walked.append(config)
        return config.model_type, deep

    return walk, walked


def reading(folder: Path) -> Walks:
    walks = Walks(folder)
    walks.enabled = True
    return walks


def test_the_second_walk_of_a_run_is_read_in_another_process_too(tmp_path: Path) -> None:
    walk, walked = counting_walk()
    for _ in range(2):  # another object knows only the folder, as another process does
        walks = reading(tmp_path)
        once = walks.remembered(walk)
        assert once(tiny_config("llama")) == once(tiny_config("llama")) == ("llama", False)
        assert once(tiny_config("llama"), deep=True) == ("llama", True)
        assert once(tiny_config("gpt2")) == ("gpt2", False)
    assert len(walked) == 3
    walks.enabled = False
    once(tiny_config("llama"))
    assert len(walked) == 4


@pytest.mark.parametrize(
    ("owner", "name", "remembered"),
    [
        (verdict, "norm_sites", False),
        (ShadowMode, "run", False),
        (apply, "undo", True),  # no walk runs what stands above it
    ],
)
def test_a_walk_under_replaced_functions_is_not_remembered(
    owner: Any, name: str, remembered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walk, walked = counting_walk()
    walks = reading(tmp_path)
    monkeypatch.setattr(owner, name, lambda *_: None)
    walks.remembered(walk)(tiny_config("llama"))
    monkeypatch.undo()
    walks.remembered(walk)(tiny_config("llama"))
    assert len(walked) == (1 if remembered else 2)


def test_in_this_run_nothing_counts_as_replaced(walks_of_run: Walks) -> None:
    assert walks_of_run.enabled
    assert walks_of_run.sources.replaced() == []


def test_a_damaged_walk_is_done_again(tmp_path: Path) -> None:
    walk, walked = counting_walk()
    reading(tmp_path).remembered(walk)(tiny_config("llama"))
    (entry,) = tmp_path.iterdir()
    entry.write_bytes(entry.read_bytes()[:5])
    assert reading(tmp_path).remembered(walk)(tiny_config("llama")) == ("llama", False)
    assert len(walked) == 2


def test_another_source_of_the_walk_has_another_folder_and_old_ones_go(tmp_path: Path) -> None:
    package, root = tmp_path / "memopt", tmp_path / "walks"
    for room in ("walk", "verification"):
        (package / room).mkdir(parents=True)
        (package / room / "rules.py").write_text("LIMIT = 1\n")
    before = folder_of_sources(root, package)
    (package / "verification" / "rules.py").write_text("LIMIT = 2\n")
    assert folder_of_sources(root, package) == before
    os.utime(before, (0, 0))
    (package / "walk" / "rules.py").write_text("LIMIT = 2\n")
    assert folder_of_sources(root, package) != before
    assert not before.exists()


def test_rooms_that_do_not_count_are_those_above_the_walk() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [layer.split(" | ") for layer in contracts[0]["layers"]]
    above = layers[: next(number for number, rooms in enumerate(layers) if "memopt.walk" in rooms)]
    assert {room.removeprefix("memopt.") for rooms in above for room in rooms} == ABOVE
