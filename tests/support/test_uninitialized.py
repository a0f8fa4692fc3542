"""Memory that was not written shows, in this run too."""

from __future__ import annotations

import pytest
import torch

from tests.support.uninitialized import poisoned


def uninitialized(dtype: torch.dtype) -> list[torch.Tensor]:
    x = torch.zeros(3, 2, dtype=dtype)
    return [
        torch.empty(3, 2, dtype=dtype),
        torch.empty_like(x),
        torch.empty_strided((3, 2), (1, 3), dtype=dtype),
        x.new_empty(3, 2),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_numbers_are_nan(dtype: torch.dtype) -> None:
    tensors = uninitialized(dtype)
    assert all(tensor.isnan().all() for tensor in tensors)
    assert not any(tensor._version for tensor in tensors)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
def test_integers_are_none_that_a_result_is_likely_to_be(dtype: torch.dtype) -> None:
    assert all(((tensor == 77) | (tensor < -(2**29))).all() for tensor in uninitialized(dtype))


def test_memory_that_was_given_is_not_filled() -> None:
    out = torch.zeros(2)
    assert torch.empty(0, out=out) is out
    assert torch.empty(2, device="meta").is_meta


def test_the_stock_functions_come_back() -> None:
    before = torch.empty
    with poisoned():
        assert torch.empty is not before
    assert torch.empty is before
