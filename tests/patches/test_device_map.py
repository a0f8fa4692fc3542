"""accelerate's device maps: hooks around every module, which move tensors between devices."""

from __future__ import annotations

from typing import Any

import pytest
from accelerate import dispatch_model
from torch import nn

import memopt
from memopt.errors import NegativeVerdict
from memopt.reporting.account import live_bytes
from tests.factories import tiny_inputs, tiny_model

MAP = dict.fromkeys(("model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "lm_head"), "cpu")


def dispatched(model: nn.Module) -> Any:
    return dispatch_model(model, MAP, main_device="cpu", force_hooks=True)


def test_a_model_that_was_patched_first_saves_as_much_behind_the_hooks() -> None:
    inputs = tiny_inputs("llama", 2, 16)
    saved = []
    for patched in (False, True):
        model = tiny_model("llama", use_cache=False)
        if patched:
            memopt.patch(model, memopt.load_recipe("exact-unfolded", ("loss.method=none",)))
        hooked = dispatched(model)
        loss = hooked(**inputs).loss
        loss.backward()
        saved.append((loss.item(), live_bytes(lambda model=hooked: model(**inputs).loss)))
    (stock_loss, stock), (loss, ours) = saved
    assert loss == pytest.approx(stock_loss, rel=1e-6)
    assert ours < 0.6 * stock


def test_patching_behind_the_hooks_is_refused_with_the_remedy() -> None:
    with pytest.raises(NegativeVerdict, match=r"dispatch_model\(model, device_map\)"):
        memopt.patch(dispatched(tiny_model("llama")))
