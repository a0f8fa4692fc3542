from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memopt.kernels.base.rows import rows_of

BASE = torch.arange(2 * 3 * 4 * 5 * 6)


def first_elements(tensor: Tensor) -> list[int]:
    """What a kernel reads first in each row, by the formula that the kernels use."""
    rows = rows_of(tensor)
    assert rows is not None
    (n1, n2), (s0, s1, s2) = rows.sizes, rows.strides
    storage = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    start = tensor.storage_offset()
    return [int(storage[start + r // (n1 * n2) * s0 + r // n2 % n1 * s1 + r % n2 * s2]) for r in range(rows.count)]


LAYOUTS = {
    "one row": BASE[:7],
    "contiguous": BASE.view(-1, 6),
    "contiguous with many dimensions": BASE.view(2, 3, 4, 5, 6),
    "a slice of the columns": BASE.view(10, 12, 6)[..., 2:5],
    "every second row": BASE.view(-1, 6)[::2],
    "transposed leading dimensions": BASE.view(4, 5, 36)[:, :, 3:9].transpose(0, 1),
    "heads of a fused projection": BASE.view(2, 10, 36)[..., 12:24].unflatten(-1, (3, 4)).transpose(1, 2),
    "expanded rows": BASE[:6].expand(4, 5, 6),
    "expanded in the middle": BASE[:60].view(10, 1, 6).expand(10, 4, 6),
    "one column": BASE.view(-1, 6)[:, 1:2],
    "one column, transposed": BASE.view(6, 120)[:, :5].t().unsqueeze(-1),
    "dimensions of one": BASE.view(1, 5, 1, 144)[..., 6:12],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_row_is_found_where_it_lies(layout: str) -> None:
    tensor = LAYOUTS[layout]
    assert first_elements(tensor) == tensor.reshape(-1, tensor.size(-1))[:, 0].tolist()


def test_evenly_spaced_rows_have_one_stride() -> None:
    rows = rows_of(BASE.view(2, 10, 36)[..., :9])
    assert rows is not None
    assert (rows.count, rows.sizes, rows.strides) == (20, (1, 1), (36, 0, 0))


def test_rows_with_gaps_between_their_elements_are_refused() -> None:
    assert rows_of(BASE.view(-1, 6).t()) is None
    assert rows_of(BASE.view(-1, 6)[:, ::2]) is None
    assert rows_of(torch.zeros(()).expand(3, 4)) is None


def test_four_leading_dimensions_that_do_not_merge_are_refused() -> None:
    tensor = BASE.view(2, 3, 4, 5, 6)
    assert rows_of(tensor.permute(3, 2, 1, 0, 4)) is None
    assert rows_of(tensor.permute(3, 2, 0, 1, 4)) is not None


def test_an_empty_tensor_has_no_rows() -> None:
    rows = rows_of(torch.empty(3, 0, 4))
    assert rows is not None
    assert rows.count == 0


def test_a_scalar_is_one_row_of_one_element() -> None:
    rows = rows_of(torch.tensor(1.0))
    assert rows is not None
    assert (rows.count, rows.strides) == (1, (0, 0, 0))
