"""Models on two devices by accelerate's device maps: the head computes the loss where it is."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import dispatch_model
from torch import Tensor, nn

import memopt
from memopt.patches.loss.lazy import LazyLogits
from tests.factories import tiny_inputs, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")]

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
BODY = dict.fromkeys(("model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb"), 0)


def models(*, patch_first: bool) -> tuple[Any, Any]:
    """A stock model and a patched one with their heads on the second device."""
    stock = tiny_model("llama", use_cache=False, tie_word_embeddings=False).train()
    ours = copy.deepcopy(stock)
    if patch_first:
        memopt.patch(ours)
    stock, ours = (dispatch_model(each, {**BODY, "lm_head": 1}) for each in (stock, ours))
    return stock, ours if patch_first else memopt.patch(ours)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_alike(ours: Any, stock: Any) -> None:
    expected, found = gradients(stock), gradients(ours)
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        assert found[name].device == each.device
        torch.testing.assert_close(found[name], each, rtol=1e-4, atol=1e-5 * float(each.abs().max()))


@pytest.mark.parametrize("patch_first", [True, False], ids=["patched first", "dispatched first"])
def test_the_loss_of_the_model_is_computed_in_parts(patch_first: bool) -> None:
    stock, ours = models(patch_first=patch_first)
    inputs = {name: each.to(FIRST) for name, each in tiny_inputs("llama", 2, 16).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected, found = stock(**inputs), ours(**inputs)
    assert isinstance(found.logits, LazyLogits)
    assert found.logits.value is None
    assert found.logits.device == expected.logits.device == FIRST
    assert found.loss.device == expected.loss.device
    torch.testing.assert_close(found.loss, expected.loss)
    for each in (expected, found):
        each.loss.backward()
    assert_alike(ours, stock)


def test_a_loss_outside_of_the_model_is_computed_in_parts_too() -> None:
    stock, ours = models(patch_first=False)
    inputs = {name: each.to(FIRST) for name, each in tiny_inputs("llama", 2, 16).items()}
    labels = inputs.pop("labels")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for model in (stock, ours):
            logits = model(**inputs).logits
            loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())
            assert loss.device == logits.detach().argmax(-1).device == FIRST
            loss.backward()
    assert_alike(ours, stock)


def test_logits_that_are_read_whole_are_moved_as_in_stock() -> None:
    stock, ours = models(patch_first=False)
    inputs = {name: each.to(FIRST) for name, each in tiny_inputs("llama", 2, 16).items()}
    expected, found = stock(**inputs).logits, ours(**inputs).logits
    with pytest.warns(UserWarning, match="computed whole, since 'einsum' reads them"):
        losses = [torch.einsum("bsv,bsv->", each, each) for each in (expected, found)]
    assert losses[1].device == FIRST
    for loss in losses:
        loss.backward()
    assert_alike(ours, stock)
