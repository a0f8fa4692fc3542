"""A fold has to be right in every branch of a forward, also in those that no guessed input takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from memopt.walk.aten.decisions import Comparison, Decisions
from memopt.walk.observe import walk_config
from memopt.walk.sites import NormSite

#: What decides whether the linear reads the norm (or what the norm reads): name -> (ids, hidden states) -> answer.
WRONG: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "short": lambda ids, x: x.shape[1] >= 7,
    "long": lambda ids, x: x.size(1) < 100,
    "one length": lambda ids, x: ids.shape[-1] != 7,
    "one of some lengths": lambda ids, x: x.shape[1] not in (6, 9),
    "multiples": lambda ids, x: x.shape[1] % 5,
    "parts": lambda ids, x: x.shape[1] // 20 == 0,
    "chunks": lambda ids, x: (x.shape[1] + 3) * 2 > 17,
    "elements": lambda ids, x: x[0].numel() > 16 * 4,
    "sign": lambda ids, x: x.sum() > -1e9,
    "opposite sign": lambda ids, x: x.sum() < 1e9,
    "number": lambda ids, x: x.sum().item() > -1e9,
    "whole number": lambda ids, x: int(ids.max()) > 0,
    "equality": lambda ids, x: not torch.equal(ids, ids + 1),
    "value behind a value": lambda ids, x: x.max() < 1e9 or ids.min() >= 0,
    "value in a short text": lambda ids, x: x.shape[1] > 6 or x.sum() < 1e9,
}


def _fails_in_an_operation(ids: Tensor, x: Tensor) -> bool:
    if not x.max() < 1e9:
        torch.cat([x, ids])
    return True


def _refuses(ids: Tensor, x: Tensor) -> bool:
    if ids.max() > 10**6:
        raise ValueError("ids are larger than the vocabulary")
    assert x.min() > -1e9
    return x.shape[1] > 0


#: What does not matter, but for the first: a branch that cannot be observed.
OTHERS = {"unseen": _fails_in_an_operation, "refusal": _refuses, "none": lambda ids, x: True}


class BranchesConfig(PreTrainedConfig):
    model_type = "memopt_test_branches"

    def __init__(self, condition: str = "none", vocab_size: int = 50, **kwargs: Any) -> None:
        self.condition, self.vocab_size, self.hidden_size = condition, vocab_size, 16
        super().__init__(**kwargs)


class BranchesModel(PreTrainedModel):
    config_class = BranchesConfig

    def __init__(self, config: BranchesConfig) -> None:
        super().__init__(config)
        self.embed, self.norm = nn.Embedding(config.vocab_size, 16), nn.LayerNorm(16)
        self.linear, self.head = nn.Linear(16, 16), nn.Linear(16, 4)
        self.condition = (WRONG | OTHERS)[config.condition]
        self.post_init()

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        output: Tensor = self.head(torch.tanh(self.linear(self.norm(x) if self.condition(input_ids, x) else x)))
        return output


AutoConfig.register(BranchesConfig.model_type, BranchesConfig, exist_ok=True)
AutoModel.register(BranchesConfig, BranchesModel, exist_ok=True)


def norm_of(condition: str) -> NormSite:
    (norm,) = walk_config(BranchesConfig(condition)).norms
    return norm


@pytest.mark.parametrize("condition", WRONG)
def test_a_fold_that_another_branch_makes_wrong_is_refused(condition: str) -> None:
    norm = norm_of(condition)
    assert norm.consumers, "the branch that is taken folds"
    assert "also reads something that this norm did not make" in norm.fold_obstacles[0]


@pytest.mark.parametrize("condition", ["none", "refusal"])
def test_a_branch_that_only_refuses_inputs_costs_no_fold(condition: str) -> None:
    assert norm_of(condition).foldable


def test_where_a_branch_cannot_be_observed_nothing_is_folded() -> None:
    (obstacle,) = norm_of("unseen").fold_obstacles
    assert "a branch on values, at test_branches.py" in obstacle


def test_what_sizes_are_compared_with_is_noted_and_computed_with_as_ever() -> None:
    x = torch.zeros(2, 16, 4)
    with Decisions() as decisions:
        batch, length, _ = x.shape
        found = (x.size(1) < 20, length % 5 == 1, (length + 4) // 2 >= 10.5, length == torch.arange(length).shape[0])
        assert torch.zeros(batch, length).reshape(x.shape[:2]).shape == (2, 16)
    assert found == (True, True, False, True)
    noted = [(each.operation, each.left, each.right) for each in decisions.sizes]
    assert noted[:5] == [("lt", 16, 20), ("%", 16, 5), ("eq", 1, 1), ("lt", 20, 2), ("ge", 10, 10.5)]
    assert all(isinstance(each, Comparison) for each in decisions.sizes)
    assert (length < 20, decisions.sizes[len(noted) :]) == (True, [])


class GivenConfig(BranchesConfig):
    model_type = "memopt_test_given_branches"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)


class GivenModel(BranchesModel):
    """No inputs can be guessed: its second argument has sizes of its own."""

    config_class = GivenConfig

    def forward(self, input_ids: Tensor, leaves: Tensor) -> Tensor:  # type: ignore[override]
        if leaves.shape != (input_ids.shape[1], 3, 11):
            raise ValueError("leaves are a matrix for each token")
        return super().forward(input_ids)


AutoConfig.register(GivenConfig.model_type, GivenConfig, exist_ok=True)
AutoModel.register(GivenConfig, GivenModel, exist_ok=True)


def norm_by_inputs(condition: str, length: int) -> NormSite:
    ids, leaves = torch.arange(2 * length).view(2, length) % 40 + 3, torch.ones(length, 3, 11)
    (norm,) = walk_config(GivenConfig(condition=condition), inputs={"input_ids": ids, "leaves": leaves}).norms
    return norm


@pytest.mark.parametrize("length", [16, 40])
@pytest.mark.parametrize("condition", [name for name in WRONG if name != "value behind a value"])
@pytest.mark.rotates(3)
def test_branches_are_looked_for_with_the_inputs_that_are_given(condition: str, length: int) -> None:
    norm = norm_by_inputs(condition, length)
    assert not norm.foldable_with_cautions


def test_a_norm_that_given_inputs_fold_in_every_branch_is_folded() -> None:
    assert norm_by_inputs("none", 16).foldable
