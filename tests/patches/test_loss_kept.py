"""Logits without a graph that the user keeps over an optimizer's step."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import torch.optim.optimizer as optimizer_module
from torch import Tensor

import memopt
from tests.patches.test_loss import Model, models
from tests.patches.test_loss_outputs import pair

pytestmark = pytest.mark.filterwarnings("ignore:.*computed whole")

KEPT = {
    "detached": lambda y: y.detach(),
    "a detached copy": lambda y: y.detach().clone(),
    "a view of the last rows": lambda y: y.detach()[:, -1],
    "another dtype": lambda y: y.detach().double(),
    "probabilities": lambda y: y.detach().softmax(-1),
}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("releases", [False, True])
def test_logits_that_are_kept_over_an_optimizers_step(name: str, releases: bool) -> None:
    kept: list[list[Tensor]] = [[], []]
    for model, found in zip(models(), kept, strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        if releases:
            memopt.release_gradients(optimizer)
        for _ in range(2):
            logits = model()
            found.append(KEPT[name](logits))
            F.cross_entropy(logits.flatten(0, 1), torch.zeros(logits.shape[:-1].numel(), dtype=torch.long)).backward()
            optimizer.step()
    torch.testing.assert_close(torch.cat(kept[1]), torch.cat(kept[0]))
    assert not optimizer_module._global_optimizer_pre_hooks


def test_logits_that_were_read_are_not_computed_at_an_optimizers_step() -> None:
    ours, logits, _ = pair()
    detached, optimizer = logits.detach(), torch.optim.SGD(ours.parameters(), lr=1.0)
    detached.argmax(-1)
    optimizer.step()
    assert detached.value is None
    assert logits.value is None


def _loss(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), torch.zeros(logits.shape[:-1].numel(), dtype=torch.long))


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("first", ["kept", "backward"])
def test_logits_that_are_kept_from_inside_the_closure_of_a_step(name: str, first: str) -> None:
    kept: list[list[Tensor]] = [[], []]
    for model, found in zip(models(), kept, strict=True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, fused=True)

        def closure(model: Model = model, found: list[Tensor] = found) -> Tensor:
            logits = model()
            loss = _loss(logits)
            if first == "backward":
                loss.backward()
            found.append(KEPT[name](logits))
            if first == "kept":
                loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
    torch.testing.assert_close(torch.cat(kept[1]), torch.cat(kept[0]))


def test_logits_that_were_read_inside_a_closure_are_not_computed() -> None:
    ours, logits, _ = pair()
    optimizer = torch.optim.SGD(ours.parameters(), lr=1.0)
    kept: list[Tensor] = []

    def closure() -> Tensor:
        kept.append(logits.detach())
        kept[0].argmax(-1)
        loss = _loss(logits)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert kept[0].value is None
    assert logits.value is None


def _fused(model: Model) -> None:
    torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True).step()


def _data(model: Model) -> None:
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data.mul(1.01))


UNCOUNTED = {"fused": _fused, "data": _data}
READ = {
    "whole": lambda y: y.tolist(),
    "detached": lambda y: y.detach(),
    "numbers": lambda y: y.argmax(-1),
    "loss": _loss,
    "gradient": lambda y: torch.autograd.grad(_loss(y), y),
}


@pytest.mark.parametrize("change", UNCOUNTED)
@pytest.mark.parametrize("read", READ)
def test_logits_read_after_a_change_that_versions_do_not_count_are_an_error(change: str, read: str) -> None:
    _, ours = models()
    logits = ours()
    _loss(logits).backward()
    versions = [parameter._version for parameter in ours.parameters()]
    UNCOUNTED[change](ours)
    assert [parameter._version for parameter in ours.parameters()] == versions, "the change is one that counts"
    with pytest.raises(RuntimeError, match=r"never computed|no gradient of their own"):
        READ[read](logits)


def test_logits_of_a_call_without_a_backward_notice_a_change_through_data() -> None:
    _, ours = models()
    logits = ours()
    _data(ours)
    with pytest.raises(RuntimeError, match="never computed"):
        logits.tolist()


def test_logits_of_frozen_weights_can_be_read_after_the_step() -> None:
    found = []
    for model in models():
        model.head.requires_grad_(False)
        logits = model()
        _loss(logits).backward()
        _fused(model)
        found.append(torch.tensor(logits.tolist()))
    torch.testing.assert_close(found[1], found[0])
