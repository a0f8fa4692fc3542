"""Logits without a graph that the user keeps over an optimizer's step."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import torch.optim.optimizer as optimizer_module
from torch import Tensor

import memopt
from memopt.patches.loss.module import patch_head
from tests.patches.test_loss import CLASSES, WIDTH, Model
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
    stock, ours = Model(), Model()
    patch_head(ours.head, WIDTH, CLASSES)
    kept: list[list[Tensor]] = [[], []]
    for model, found in zip((stock, ours), kept, strict=True):
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
