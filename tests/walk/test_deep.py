"""The sites of a deep model are those of a walk over all of it."""

from __future__ import annotations

import pytest
from torch import nn

from memopt.walk import deep
from memopt.walk.deep import find_deep_sites
from memopt.walk.models.build import build_meta
from memopt.walk.observe import find_sites
from tests.trace.builders import named_config


@pytest.mark.parametrize("name", ["llama", "bert"])  # sites of BERT name the next block
def test_a_walk_over_a_few_blocks_finds_the_sites_of_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = named_config(name, num_hidden_layers=7)
    walked: list[nn.Module] = []
    monkeypatch.setattr(deep, "find_sites", lambda model, **_: (walked.append(model), find_sites(model))[1])
    model = build_meta(config)
    names = [name for name, _ in model.named_modules()]
    assert find_deep_sites(model) == find_sites(build_meta(config))
    assert len(walked) == 1
    assert [name for name, _ in model.named_modules()] == names


@pytest.mark.rotates(3)
def test_sites_that_name_blocks_far_away_are_found_by_a_whole_walk() -> None:
    """The last norm of an encoder names the linears of all blocks of the decoder."""
    config = named_config("t5", num_layers=6)
    assert find_deep_sites(build_meta(config)) == find_sites(build_meta(config))
