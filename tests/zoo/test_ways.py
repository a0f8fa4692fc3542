"""Steps with the ways of long training: of two quick types, new ones each day, and with faults that must be noticed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memopt.patches.checkpointing import kept
from memopt.patches.tile import module
from tests.zoo.test_zoo import SAMPLE, is_quick
from tests.zoo.ways import examine_ways

QUICK = [name for name in SAMPLE if is_quick(name)][:2]


@pytest.mark.walks(shared=True)
@pytest.mark.parametrize("model_type", QUICK)
def test_steps_with_the_ways_of_long_training_are_the_stock_models(model_type: str) -> None:
    row = examine_ways(model_type)
    assert row.status != "wrong", row.reason


@pytest.mark.walks(shared=True)
def test_a_kept_output_and_a_tile_that_are_slightly_off_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(function: Any) -> Any:
        return lambda *args: torch.utils._pytree.tree_map(lambda each: each * (1 + 1e-7), function(*args))

    for owner, name in ((kept._Output, "again"), (module, "_gradients")):
        with monkeypatch.context() as fault:
            fault.setattr(owner, name, off(getattr(owner, name)))
            row = examine_ways("llama")
        assert row.status == "wrong", name
        assert row.reason.startswith("long-context: gradients differ"), name
