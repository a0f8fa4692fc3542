"""What the operations of a step compute and move."""

from __future__ import annotations

import torch
from torch import nn

from memopt.trace.operations import Operation, operation
from memopt.trace.timeline import record


def operations(model: nn.Module, x: torch.Tensor) -> list[Operation]:
    return list(record(model, lambda: model(x)).operations)


def test_a_linear_has_three_products() -> None:
    model = nn.Linear(16, 32, bias=False)
    found = operations(model, torch.randn(8, 16, requires_grad=True))
    assert [each.flops for each in found if each.flops] == [2 * 8 * 16 * 32] * 3


def test_an_operation_moves_its_operands_and_its_result() -> None:
    found = operations(nn.ReLU(), torch.randn(8, 16, requires_grad=True))
    forward = found[0]
    assert (forward.nbytes, forward.flops, forward.itemsize) == (2 * 8 * 16 * 4, 0, 4)


def test_a_view_costs_nothing() -> None:
    stock, with_view = (
        operations(model, torch.randn(8, 4, 4, requires_grad=True))
        for model in (nn.ReLU(), nn.Sequential(nn.ReLU(), nn.Flatten()))
    )
    assert len(with_view) == len(stock)


def test_an_embedding_reads_the_rows_that_it_needs() -> None:
    model = nn.Embedding(10_000, 4)
    found = operations(model, torch.zeros(3, dtype=torch.long))
    assert found[0].nbytes == 2 * 3 * 4 * 4


def test_a_product_that_is_summed_up_in_fp32_is_one_of_its_factors() -> None:
    left, right = (torch.ones(8, 8, dtype=torch.bfloat16) for _ in range(2))
    for total in (torch.zeros(8, 8), torch.zeros(8, 8, dtype=torch.bfloat16)):
        found = operation(torch.ops.aten.addmm.default, (total, left, right), {}, torch.empty_like(total), 0)
        assert found is not None
        assert found.itemsize == 2
