"""Meta tensors answer what forwards ask of values."""

from __future__ import annotations

from collections.abc import Callable

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


@pytest.mark.parametrize("test", [torch.isnan, torch.isinf, torch.isposinf, torch.isneginf])
def test_all_values_are_finite(test: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.ones(2, 3, device="meta")
    with MetaReads():
        assert torch.isfinite(x).all()
        assert not test(x).any()
        assert (~test(x)).all()
        assert test(x).sum().item() == 0
        assert not test(x.sum())
        assert (x.masked_fill(test(x), 0) * test(x)).is_meta


def test_a_window_of_istft_is_large_enough() -> None:
    window = torch.ones(8, device="meta")
    with MetaReads():
        frames = torch.stft(torch.ones(64, device="meta"), 8, 4, window=window, return_complex=True)
        assert torch.istft(frames, 8, 4, window=window, length=64).shape == (64,)


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


def test_what_has_no_value_stays_on_meta() -> None:
    with MetaReads():
        wave = torch.empty(2, 5, device="meta").clamp(-1, 1).cpu()
        with pytest.raises(NotImplementedError):
            torch.empty(3, dtype=torch.int64, device="meta").tolist()
    assert (wave.device.type, wave.shape) == ("meta", (2, 5))


def test_whole_numbers_keep_their_values_where_they_are_asked_for_on_meta() -> None:
    """... so a forward that splits packed images by their sizes runs."""
    sizes = torch.tensor([[2, 3], [4, 5]])
    rows = torch.empty(26, 7, device="meta")
    for keeps in (True, False):
        with MetaReads(keeps_values=keeps):
            lengths = sizes.to("meta").prod(-1)
            assert lengths.is_meta is not keeps
            if keeps:
                assert [part.shape for part in rows.split(lengths.tolist())] == [(6, 7), (20, 7)]
                assert torch.ones(3).to("meta").is_meta
