"""Alike pieces of a work are traced three times, and counted as often as there are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt.kernels.base import pieces as parts
from memopt.kernels.base.pieces import pieces
from memopt.patches.loss import plain
from memopt.plan.recipe import load_recipe
from memopt.torch_compat import FakeTensorMode
from memopt.trace import timeline
from memopt.trace.timeline import Timeline, record
from memopt.trace.trace import trace
from memopt.trace.tracer import _form
from memopt.trace.training import Step, Training
from tests.trace.builders import named_config, sites_of

ROWS = 38


@contextlib.contextmanager
def not_counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(timeline, "counting", lambda counter: contextlib.nullcontext())
        yield


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """How many pieces were put in at a time, and whether they were."""
    calls = []
    original = Timeline.repeat

    def repeat(self: Timeline, first: Any, second: Any, count: int) -> bool:
        calls.append((count, original(self, first, second, count)))
        return calls[-1][1]

    monkeypatch.setattr(Timeline, "repeat", repeat)
    return calls


@pytest.mark.parametrize(
    ("name", "training"),
    [
        ("llama", Training(2, 64, train="lora")),
        ("llama", Training(2, 64, cuda_kernels=False)),
        ("gemma2", Training(2, 64)),  # its logits are capped: a piece has a graph of its own
        ("gpt2", Training(2, 64, "fp32")),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.rotates(3)
def test_a_step_of_counted_pieces_is_that_of_all(
    name: str, training: Training, at_once: bool, monkeypatch: pytest.MonkeyPatch, repeated: list[tuple[int, bool]]
) -> None:
    monkeypatch.setattr(plain.Plain, "is_at_once", at_once)
    monkeypatch.setattr(plain, "ROWS", 20)
    monkeypatch.setattr(plain, "COLUMNS", 8)
    monkeypatch.setattr(plain, "chunk_bytes", lambda x: 8 * len(x) * x.element_size())
    monkeypatch.setattr(parts, "LEAST", 64)
    config = named_config(name)
    options: dict[str, Any] = {"sites": sites_of(config), "recipe": load_recipe("exact-unfolded")}
    counted = trace(Step(config, training, **options))
    assert [count for count, put_in in repeated if put_in and count > 1]
    with not_counted(monkeypatch):
        whole = trace(Step(config, training, **options))
    assert _form(counted) == _form(whole)
    assert counted.operations == whole.operations


class Pieces(nn.Module):
    """x W in pieces; `body` does with each what it likes."""

    def __init__(self, body: Callable[[Tensor, int, list[Tensor]], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.body, self.seen = body, list[int]()

    def forward(self, x: Tensor) -> Any:
        total, kept = self.weight.new_zeros(()), list[Tensor]()
        with torch.no_grad():
            for part in pieces((slice(start, min(start + 4, ROWS)) for start in range(0, ROWS, 4)), x):
                self.seen.append(part.start)
                y = self.body(x[part] @ self.weight, part.start, kept)
                total += y.sum()
        return SimpleNamespace(loss=(x @ self.weight).sum() + total + sum(each.sum() for each in kept))


def events_of(model: nn.Module, x: Tensor) -> list[tuple[Any, ...]]:
    model.zero_grad()
    found = record(model, lambda: model(x))
    return [
        (life.nbytes, life.born, life.died, life.birth.operation, life.before and life.before.born)
        for life in found.events
    ]


def summed(y: Tensor, start: int, kept: list[Tensor]) -> Tensor:
    kept[:] = [(kept[0] if kept else 0) + y.sum()]
    return y.exp() + y


def popped(y: Tensor, start: int, kept: list[Tensor]) -> Tensor:
    if start == 0:
        kept.extend(y.exp() for _ in range(ROWS))
    kept.pop()
    return y


ALIKE: list[Callable[[Tensor, int, list[Tensor]], Tensor]] = [
    lambda y, start, kept: y.exp().add_(1),
    lambda y, start, kept: torch.cat([y, y.sin()]),
    summed,
]
UNLIKE: list[Callable[[Tensor, int, list[Tensor]], Tensor]] = [
    lambda y, start, kept: kept.append(y) or y,  # type: ignore[func-returns-value]
    lambda y, start, kept: y.exp() if start == 8 else y,
    lambda y, start, kept: y.exp() if start == 8 else y.sin(),
    popped,
    lambda y, start, kept: y[:, :4] @ y[:, :4].t() if start == 8 else y @ y.t(),  # storages alike, products not
]


def counted_and_whole(body: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], bool]:
    """Pieces that ran, and whether the step is that without counting."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, x = Pieces(body), torch.empty(ROWS, 8)
        counted = events_of(model, x)
        seen, model.seen = model.seen, []
        with not_counted(monkeypatch):
            return seen, counted == events_of(model, x)


@pytest.mark.parametrize("body", ALIKE)
def test_three_pieces_and_the_last_run(body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert counted_and_whole(body, monkeypatch) == ([0, 4, 8, 36], True)


@pytest.mark.parametrize("body", UNLIKE)
def test_pieces_that_are_not_alike_all_run(body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert counted_and_whole(body, monkeypatch) == (list(range(0, ROWS, 4)), True)


def test_tensors_with_values_run_in_all_pieces() -> None:
    model = Pieces(ALIKE[0])
    events_of(model, torch.randn(ROWS, 8))
    assert model.seen == list(range(0, ROWS, 4))
