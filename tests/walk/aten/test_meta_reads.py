"""Meta tensors answer what forwards ask of values."""

from __future__ import annotations

import pytest
import torch

from memopt.walk.aten.meta_reads import MetaReads


def test_numbers_and_meta_tensors_mix() -> None:
    with MetaReads():
        out = torch.ones(2, 3, device="meta") * torch.arange(3)
    assert (out.device.type, out.shape) == ("meta", (2, 3))


def test_a_branch_on_values_gets_a_yes() -> None:
    with MetaReads():
        assert bool(torch.ones(4, dtype=torch.bool, device="meta").all())


def test_an_error_that_devices_do_not_explain_stays() -> None:
    with MetaReads(), pytest.raises(RuntimeError):
        torch.ones(2, 3) @ torch.ones(2, 3)


def test_every_element_counts_as_not_zero() -> None:
    """... so each expert of a mixture that looks for its tokens has some."""
    with MetaReads():
        rows, columns = (torch.empty(3, 4, device="meta") == 1).nonzero(as_tuple=True)
    assert (rows.shape, columns.shape, rows.dtype) == ((12,), (12,), torch.int64)
