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


def test_an_expert_is_found_by_its_name() -> None:
    with MetaReads():
        hit = (torch.empty(3, device="meta") == 1).nonzero()
        assert [f"expert_{expert[0]}" for expert in hit] == 3 * ["expert_1"]


def test_a_mask_picks_every_element() -> None:
    with MetaReads():
        tokens = torch.empty(3, 4, device="meta")
        assert tokens[tokens > 0].shape == (12,)
        tokens[tokens > 0] = 0.0


def test_a_number_reads_as_what_was_computed_with_it() -> None:
    with MetaReads():
        longest = torch.empty(3, 4, dtype=torch.int64, device="meta").sum(1).max()
        assert (int(longest), int(5 - longest)) == (1, 4)
