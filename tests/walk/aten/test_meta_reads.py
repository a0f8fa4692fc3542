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


def test_places_of_elements_have_values() -> None:
    """... which tell the experts of a mixture by their names."""
    with MetaReads():
        (rows,) = (torch.empty(3, device="meta") == 1).nonzero(as_tuple=True)
        assert [f"expert_{row}" for row in rows] == ["expert_0", "expert_1", "expert_2"]
        assert torch.empty(3, 4, device="meta")[rows].shape == (3, 4)


def test_a_mask_picks_every_element() -> None:
    with MetaReads():
        tokens = torch.empty(3, 4, device="meta")
        assert tokens[tokens > 0].shape == (12,)
        tokens[tokens > 0] = 0.0


def test_a_number_reads_as_what_was_computed_with_it() -> None:
    with MetaReads():
        longest = torch.empty(3, 4, dtype=torch.int64, device="meta").sum(1).max()
        assert (int(longest), int(5 - longest)) == (1, 4)


def test_each_expert_has_as_many_tokens_as_the_others() -> None:
    with MetaReads():
        scores = torch.empty(6, 4, device="meta")
        weights, experts = scores.topk(2)
        assert (weights.device.type, experts.flatten().bincount().tolist()) == ("meta", [3, 3, 3, 3])
        assert int(scores.argmax()) == 1
