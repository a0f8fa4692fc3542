"""A checkpointed block decides alike when it runs again, where its values decide (routing of experts)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import count

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.patches.checkpointing.module import BlockRewrite, patch_block
from memopt.patches.swap import states_in
from memopt.plan.recipe import load_recipe
from tests.factories import tiny_inputs, tiny_model
from tests.support.compare import gradients_of

EXPERTS, WIDTH = 4, 64
#: Scores are so many units of rounding from a tie, in each run to the other side.
EDGE = 8


def flips(scores: Tensor, runs: Iterator[int]) -> Tensor:
    """`scores` of ties that are broken the other way at every other run."""
    scores = scores if scores.dtype == torch.float64 else scores.float()
    order = torch.arange(scores.shape[-1], dtype=scores.dtype) * EDGE * torch.finfo(scores.dtype).eps
    return scores + (order if next(runs) % 2 else order.flip(0))


def top(scores: Tensor) -> tuple[Tensor, Tensor]:
    weights, chosen = scores.softmax(-1).topk(2, -1)
    return weights, chosen


def by_sort(scores: Tensor) -> tuple[Tensor, Tensor]:
    weights, order = torch.sort(scores.softmax(-1), descending=True)
    return weights[:, :1], order[:, :1]


def by_argsort(scores: Tensor) -> tuple[Tensor, Tensor]:
    chosen = torch.argsort(scores, dim=-1)[:, -1:]
    return scores.sigmoid().gather(-1, chosen), chosen


def by_argmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    chosen = scores.argmax(-1, keepdim=True)
    return scores.sigmoid().gather(-1, chosen), chosen


def by_max(scores: Tensor) -> tuple[Tensor, Tensor]:
    return scores.sigmoid().max(dim=-1, keepdim=True)


def by_groups(scores: Tensor) -> tuple[Tensor, Tensor]:
    """As DeepSeek-V3: the best group first."""
    groups = torch.topk(input=scores.view(-1, 2, 2), k=2)[0].sum(-1).topk(1, sorted=False)[1]
    mask = torch.zeros(len(scores), 2, dtype=scores.dtype).scatter_(1, groups, 1).repeat_interleave(2, 1)
    return scores.sigmoid().masked_fill(~mask.bool(), 0.0).topk(1, -1)


ROUTERS = (top, by_sort, by_argsort, by_argmax, by_max, by_groups)


class Experts(nn.Module):
    def __init__(self, route: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.gate, self.route, self.dropout = nn.Linear(WIDTH, EXPERTS, bias=False), route, nn.Dropout(0.1)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        nn.init.zeros_(self.gate.weight)
        self.runs: Iterator[int] = count()

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(x)
        weights, chosen = self.route(flips(self.gate(x), self.runs))
        y = x
        for number, expert in enumerate(self.experts):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            y = y.index_add(0, rows, (expert(x[rows]).tanh() * weights[rows, place, None]).to(y.dtype))
        return y


def step(model: nn.Module, x: Tensor, autocast: bool) -> dict[str, Tensor]:
    torch.manual_seed(2)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(x).double().square().sum()
    return gradients_of(model, loss)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype) -> None:
    """To what scores differ by that are `EDGE` apart, or to a rounding of it. Other experts would differ by all."""
    assert found.keys() == expected.keys()
    largest = max(each.norm() for each in expected.values())
    for name, each in expected.items():
        assert (found[name] - each).norm() <= EXPERTS * EDGE * torch.finfo(dtype).eps * largest, name


@pytest.fixture
def x() -> Tensor:
    return torch.randn(9, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("route", ROUTERS)
def test_a_router_on_the_edge_of_a_tie_decides_once(
    route: Callable[[Tensor], tuple[Tensor, Tensor]], autocast: bool, x: Tensor
) -> None:
    torch.manual_seed(0)
    stock = Experts(route).train()
    stock, x = (stock, x.float()) if autocast else (stock.double(), x)
    ours = copy.deepcopy(stock)
    patch_block(ours, None, True, None)
    for place in range(4):
        ours.runs, stock.runs = count(place), count(place)
        found, expected = step(ours, x, autocast), step(stock, x, autocast)
        assert next(ours.runs) == place + 2
        assert_same(found, expected, torch.bfloat16 if autocast else torch.float64)


def test_numbers_that_python_reads_are_read_once(x: Tensor) -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.runs = nn.Linear(WIDTH, WIDTH).double(), count()

        def forward(self, x: Tensor) -> Tensor:
            score = x.sum() * 0 + (-1.0) ** next(self.runs)
            return self.a(x).sin() if score > 0 else self.a(x).exp() * float(score)

    torch.manual_seed(0)
    stock = Branch().train()
    ours = copy.deepcopy(stock)
    patch_block(ours, None, True, None)
    for place in range(2):
        ours.runs, stock.runs = count(place), count(place)
        assert_same(step(ours, x, False), step(stock, x, False), torch.float64)


@pytest.mark.parametrize("settings", [(), ("checkpointing.method=full",)])
def test_a_mixture_of_experts_whose_second_run_would_choose_others(settings: tuple[str, ...]) -> None:
    stock, inputs = tiny_model("mixtral", torch.float64, experts_implementation="eager"), tiny_inputs("mixtral")
    routers = [name for name, _ in stock.named_modules() if name.endswith(".gate")]
    edge = EDGE * torch.finfo(torch.float32).eps  # the router computes in fp32 whatever the dtype of the model
    for name in routers:
        weight = stock.get_submodule(name).weight.data
        weight.copy_(torch.arange(len(weight)).unsqueeze(1).expand_as(weight))
    ours, found = memopt.patch(copy.deepcopy(stock), load_recipe("exact-levels", settings)), []
    for model in (ours, stock):
        runs = count()

        def near_a_tie(router: nn.Module, given: tuple[Tensor], runs: Iterator[int] = runs) -> tuple[Tensor]:
            return (torch.full_like(given[0], edge if next(runs) < len(routers) else -edge),)

        for name in routers:
            model.get_submodule(name).register_forward_pre_hook(near_a_tie)
        model(**inputs).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        assert next(runs) == len(routers) + sum(s.is_checkpointed for *_, s in states_in(model, BlockRewrite))
    assert_same(*found, torch.float32)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_dense_blocks_decide_nothing(name: str) -> None:
    model = memopt.patch(tiny_model(name), load_recipe("exact-unfolded", ["checkpointing.method=full"]))
    for _ in range(3):
        model(**tiny_inputs(name)).loss.backward()
    blocks = [state.state for *_, state in states_in(model, BlockRewrite) if state.is_checkpointed]
    assert blocks
    assert not any(block.decides for block in blocks)
