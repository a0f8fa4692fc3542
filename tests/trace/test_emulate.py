"""What traces say of operators whose shape rule PyTorch lacks."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memopt.trace.emulate import AnyGroupedProduct
from memopt.trace.fake import Fakes

GROUPS, ROWS, INNER, COLUMNS = 4, 16, 8, 24
OFFSETS = torch.tensor([4, 8, 12, ROWS], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("a", "b", "offsets"),
    [
        ((ROWS, INNER), (GROUPS, INNER, COLUMNS), OFFSETS),
        ((INNER, ROWS), (ROWS, COLUMNS), OFFSETS),
        ((GROUPS, COLUMNS, INNER), (INNER, ROWS), OFFSETS),
        ((GROUPS, ROWS, INNER), (GROUPS, INNER, COLUMNS), None),
    ],
    ids=["groups of rows", "groups of summands", "groups of columns", "batches"],
)
def test_a_grouped_product_has_the_size_of_the_real_one(
    a: tuple[int, ...], b: tuple[int, ...], offsets: torch.Tensor | None, dtype: torch.dtype
) -> None:
    factors = torch.ones(a, dtype=dtype), torch.ones(b, dtype=dtype)
    real = torch.nn.functional.grouped_mm(*factors, offs=offsets)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, AnyGroupedProduct():
        traced = torch.nn.functional.grouped_mm(*map(fake.from_tensor, factors), offs=offsets)
    assert (traced.shape, traced.dtype) == (real.shape, real.dtype)


def test_the_gradient_of_a_group_norm_has_the_dtype_of_its_input() -> None:
    """Under autocast on the CPU the input has 16 bits and the weight 32."""
    x, weight = torch.randn(2, 4, 6, dtype=torch.bfloat16), torch.randn(4)
    moments = torch.zeros(2, 2, dtype=torch.float32)
    given = (x, x, moments, moments, weight, 2, 4, 6, 2, [True, True, True])
    real = torch.ops.aten.native_group_norm_backward(*given)
    fake = Fakes()
    with fake:
        traced = torch.ops.aten.native_group_norm_backward(
            *(fake.from_tensor(each) if isinstance(each, torch.Tensor) else each for each in given)
        )
    assert [each.dtype for each in traced] == [each.dtype for each in real]
