"""Copies in page-locked memory: what PyTorch's allocator takes for them is what is counted, and little is lost."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memopt.saved import host
from memopt.saved.host import HostCopy, host_bytes, host_pieces


def power_of_two_above(nbytes: int) -> int:
    """The rule of PyTorch's CachingHostAllocator."""
    return 1 << (nbytes - 1).bit_length()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that the allocator takes for each block; the memory itself is not page-locked here."""
    blocks: list[int] = []

    def allocate(nbytes: int) -> Tensor:
        blocks.append(power_of_two_above(nbytes))
        return torch.full((nbytes,), 255, dtype=torch.uint8)

    monkeypatch.setattr(host, "_page_locked", allocate)
    return blocks


@pytest.mark.parametrize("shape", [(1,), (7, 333), (1000, 1000), (3, 12345, 67), (1 << 20,), (1025, 1024)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_allocator_takes_what_is_counted(taken: list[int], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.randn(shape).to(dtype)
    copy = HostCopy(tensor)
    copy.fill(tensor)
    assert sum(taken) == host_bytes(tensor.nbytes) < tensor.nbytes + max(4096, tensor.nbytes / 128)
    back = copy.empty_on(tensor.device)
    copy.copy_to(back)
    assert torch.equal(back, tensor)


@pytest.mark.parametrize("nbytes", [1, 4096, 4097, 10**6, 2**30, 2**30 + 1, 2**31 - 1, 671_744 * 4096 * 2])
def test_a_copy_has_few_pieces_and_loses_less_than_one_part_of_128(nbytes: int) -> None:
    pieces = host_pieces(nbytes)
    assert sum(map(power_of_two_above, pieces)) == host_bytes(nbytes)
    assert nbytes <= host_bytes(nbytes) < nbytes + max(4096, nbytes / 128)
    assert len(pieces) <= 9


def test_the_order_of_strides_and_a_place_in_a_larger_storage_are_kept(taken: list[int]) -> None:
    tensor = torch.randn(5, 4, 300, 7)[2:].permute(3, 1, 0, 2)
    assert tensor.storage_offset()
    copy = HostCopy(tensor)
    copy.fill(tensor)
    back = copy.empty_on(tensor.device)
    copy.copy_to(back)
    assert torch.equal(back, tensor)
    assert back.stride() == tensor.stride()
