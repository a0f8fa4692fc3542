"""Models that cannot be made small: no fold is proved, and all else is patched."""

from __future__ import annotations

import pytest

from memopt.plan.plan import make_plan
from memopt.plan.recipe import load_recipe
from memopt.walk.models.shrink import config as shrink
from memopt.walk.observe import walk_config
from tests.walk.configs import tiny_llama


def test_a_model_that_has_no_small_form_is_patched_without_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shrink, "_RECIPES", ())
    plan = make_plan(walk_config(tiny_llama()), load_recipe("exact"))
    assert not plan.folds()
    assert plan.counts()["norm"] == {"share": 7}
    assert any("no fold is proved: Model type 'llama' has no small form" in note for note in plan.sites.notes)
