"""Whatever is done to the logits of a patched head, in whatever order: what the stock head shows is what it shows."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch

from memopt.patches.loss.lazy import HANDLERS
from tests.patches.logit_cases import OPERATIONS, READERS, Case, cases, in_chunks, outcome, wrong


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of a product, where the whole has fourteen and rounds otherwise."""
    in_chunks(monkeypatch, lambda x: 12 * 40 * 2, ROWS=2, COLUMNS=16)


@pytest.mark.parametrize("count", [400, pytest.param(4000, marks=pytest.mark.slow)])
def test_a_matrix_of_programs_is_stock(count: int) -> None:
    different: list[str] = []
    seen: Counter[str] = Counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in cases(count):
            stock = outcome(case, patched=False)
            found = wrong(case, stock)
            seen["an error" if "error" in stock else "a loss"] += 1
            if found:
                different.append(f"{case}: {found}")
    print(f"{count} cases, {seen['a loss']} with a loss and {seen['an error']} with an error: {len(different)} differ")
    assert min(seen.values()) > count // 20
    assert not different, "\n".join(different[:20])


#: `detach_` stays uncomputed only where nothing else was made of the logits (tests/patches/test_loss_outputs.py).
_ELSEWHERE = {"detach_"}
#: Names under which PyTorch calls no function of a subclass: it calls `mul` and `add`.
_NEVER_CALLED = {"__radd__", "__rmul__"}


def test_the_matrix_has_every_operation_on_uncomputed_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    answered: set[str] = set()

    def noting(function: Any, handler: Any) -> Any:
        def answer(*args: Any, **kwargs: Any) -> Any:
            found = handler(*args, **kwargs)
            if found is not NotImplemented:
                answered.add(function.__name__)
            return found

        return answer

    for function, handler in HANDLERS.items():
        monkeypatch.setitem(HANDLERS, function, noting(function, handler))
    pairs = [(operation, "cross_entropy") for operation in OPERATIONS] + [("nothing", reader) for reader in READERS]
    for operation, reader in pairs:
        outcome(Case(operation, "itself", "nothing", reader, "before", "plain", torch.float32), patched=True)
    assert {function.__name__ for function in HANDLERS} - answered == _ELSEWHERE | _NEVER_CALLED


def test_products_of_one_shape_round_each_row_alike() -> None:
    """... which is what the comparisons of the matrix stand on."""
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = torch.randn(64, 576, dtype=dtype), torch.randn(300, 576, dtype=dtype)
        for count in (2, 8, 64):
            moved = torch.roll(x[:count], 1, 0) @ weight.t()
            assert torch.equal(torch.roll(moved, -1, 0), x[:count] @ weight.t())
