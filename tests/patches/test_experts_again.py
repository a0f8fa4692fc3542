"""Adapters on experts and routers in checkpointed blocks: PEFT registers parametrisations in each forward, which counts
as a change of the weights, though no number changes."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import memopt
from memopt.patches.checkpointing.module import patch_block
from tests.patches.test_experts import FAMILIES, IDS, base
from tests.patches.twice import CHANGED

RECIPES = {
    "full": ("exact-unfolded", ("checkpointing.method=full",)),
    "levels": ("exact-levels", ()),
    "long context": ("long-context", ()),
}


@pytest.mark.filterwarnings("error:memopt")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
@pytest.mark.parametrize("backwards", ["in order", "both at the end"])
@pytest.mark.rotates(3)
def test_adapters_of_all_linears_and_experts(family: str, recipe: str, backwards: str) -> None:
    assert family in FAMILIES
    found = []
    for patches in (True, False):
        torch.manual_seed(1)
        model = get_peft_model(base(family, "eager"), LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
        if patches:
            memopt.patch(model, memopt.load_recipe(*RECIPES[recipe]))
        gradients = []
        for _ in range(2):
            model.zero_grad()
            losses = (model(input_ids=ids, labels=ids).loss for ids in (IDS, IDS.roll(1, 1)))
            for loss in losses if backwards == "in order" else list(losses):
                loss.backward()
            gradients += [p.grad for p in model.parameters() if p.grad is not None]
        found.append(gradients)
    assert len(found[0]) == len(found[1])
    for mine, theirs in zip(*found, strict=True):
        assert (mine - theirs).norm() <= 1e-6 * theirs.norm() + 1e-9


class Clamped(nn.Module):
    """A block whose forward changes its own weight, or only counts as one that does."""

    def __init__(self, changes: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.changes, self.linear = changes, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.changes:
                self.linear.weight.mul_(0.5)
            else:
                self.linear.weight.set_(self.linear.weight)
        return x + self.linear(x).relu().square()


@pytest.mark.parametrize("calls", [1, 3])
def test_a_forward_that_changes_its_weights_is_an_error_in_every_step(calls: int) -> None:
    block = Clamped(True)
    patch_block(block, None, True, None)
    for _ in range(calls):
        loss = block(torch.ones(2, 3, 8, requires_grad=True)).sum()
        with pytest.raises(RuntimeError, match=CHANGED):
            loss.backward()


def test_numbers_are_compared_until_they_were_seen_to_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    summed: list[Tensor] = []
    digest = memopt.patches.unseen._digest
    monkeypatch.setattr("memopt.patches.unseen._digest", lambda t: summed.append(t) or digest(t))
    block = Clamped(False)
    patch_block(block, None, True, None)
    for _ in range(3):
        block(torch.ones(2, 3, 8, requires_grad=True)).sum().backward()
    # Before and after the second run of the first step.
    assert list(map(id, summed)) == 2 * list(map(id, block.parameters()))
