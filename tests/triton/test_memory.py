"""The helpers that watch memory see what they are there to see."""

from __future__ import annotations

import pytest
import torch

from tests.triton.conftest import DEVICE
from tests.triton.memory import RedZones, lazily_huge


def test_an_output_written_within_its_bounds_passes() -> None:
    with RedZones():
        torch.empty(3, 5, device=DEVICE, dtype=torch.bfloat16).fill_(1)


@pytest.mark.parametrize("offset", [-1, 15])
def test_a_write_just_outside_of_an_output_is_seen(offset: int) -> None:
    zones = RedZones()
    with zones:
        output = torch.empty(3, 5, device=DEVICE, dtype=torch.bfloat16)
    output.as_strided((1,), (1,), output.storage_offset() + offset).fill_(1)
    with pytest.raises(AssertionError, match="output"):
        zones.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_a_kernel_forgets_to_write_is_nan(dtype: torch.dtype) -> None:
    with RedZones():
        like = torch.zeros(4, 6, device=DEVICE, dtype=dtype).t()
        outputs = [torch.empty(7, device=DEVICE, dtype=dtype), torch.empty_like(like), like.new_empty(2, 3)]
    assert all(output.isnan().all() for output in outputs)
    assert outputs[1].stride() == like.stride()


def test_the_allocations_of_a_tensors_own_operations_are_left_alone() -> None:
    with RedZones():
        assert torch.equal(torch.ones(3, device=DEVICE) + 1, torch.full((3,), 2.0, device=DEVICE))


@pytest.mark.parametrize("stride", [(1, 4), (0, 1), (12, 3)])
def test_a_guarded_input_has_the_same_values_and_strides(stride: tuple[int, int]) -> None:
    tensor = torch.arange(64.0, device=DEVICE).as_strided((4, 3), stride)
    with RedZones() as zones:
        guarded = zones.guard(tensor)
    assert torch.equal(guarded, tensor)
    assert guarded.stride() == tensor.stride()


@pytest.mark.parametrize("offset", [-1, 0, 1, 3])
def test_a_write_to_a_guarded_input_or_its_gaps_is_seen(offset: int) -> None:
    zones = RedZones()
    guarded = zones.guard(torch.zeros(8, device=DEVICE)[::4])
    guarded.as_strided((1,), (1,), guarded.storage_offset() + offset).fill_(7)
    with pytest.raises(AssertionError, match="input"):
        zones.check()


def test_the_fixture_watches_the_whole_test(red_zones: RedZones) -> None:
    assert torch.empty(2, device=DEVICE).isnan().all()
    red_zones.check()


def test_a_huge_tensor_is_usable_far_behind_2_to_the_31_elements() -> None:
    huge = lazily_huge((2, 4), (2**31 + 64, 1), torch.bfloat16, DEVICE)
    huge.fill_(3)
    assert huge.storage_offset() + huge.stride(0) > 2**31
    assert huge[1].tolist() == [3.0] * 4
