"""The loss of every model type with a cross-entropy over a head's logits: the stock one, and never computed whole.

Four of the quick types run in `make test`, all of them in `make test-all`.
"""

from __future__ import annotations

import pytest

from memopt.patches.loss import operations
from memopt.patches.loss.lazy import HANDLERS
from tests.zoo.losses import examine_loss, types_with_a_head
from tests.zoo.test_zoo import SAMPLE, is_quick

#: Types whose logits are computed whole, and why.
WHOLE = {"dia": "its head is that of several vocabularies, which it cuts apart"}
TYPES = types_with_a_head()
#: A part of the share is enough each day.
QUICK = [name for name in SAMPLE if name in TYPES and is_quick(name)][:4]


@pytest.mark.walks(shared=True)
@pytest.mark.parametrize(
    "model_type", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TYPES]
)
def test_losses_and_gradients_are_the_stock_models(model_type: str) -> None:
    row = examine_loss(model_type)
    assert row.status != "wrong", row.reason
    assert row.status != "whole" or model_type in WHOLE, row.reason


def test_a_model_that_reads_its_logits_whole_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for function in [key for key, handler in HANDLERS.items() if "_reshape" in handler.func.__qualname__]:
        monkeypatch.delitem(operations.HANDLERS, function)
    assert examine_loss("llama").status == "whole"
