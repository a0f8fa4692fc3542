"""Seeded dropout on a real device: the mask of the CPU, PyTorch's own arithmetic, streams, graphs, large tensors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memopt.kernels.dropout import function as dropout
from memopt.kernels.dropout.function import seeded_dropout
from memopt.patches.dropout.module import patch_dropout
from tests.gpu.sizes import size

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
COUNT = size(300 * 1000, 3000) + 7
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def draw(dtype: torch.dtype = torch.bfloat16, count: int = COUNT) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)


@every_dtype
@pytest.mark.parametrize("seed", [0, 2**63 + 5])
def test_the_mask_is_that_of_the_cpu(seed: int, dtype: torch.dtype) -> None:
    x = torch.ones(COUNT, dtype=dtype, device=DEVICE)
    assert torch.equal((seeded_dropout(x, 0.3, seed) != 0).cpu(), seeded_dropout(x.cpu(), 0.3, seed) != 0)


@pytest.mark.parametrize(
    "dtype",
    [
        # On a CPU PyTorch scales the mask in 16 bits, on a device the values in fp32.
        pytest.param(dtype, marks=[pytest.mark.real_device("arithmetic in 16 bits")] if dtype.itemsize == 2 else [])
        for dtype in DTYPES
    ],
    ids=str,
)
@pytest.mark.parametrize("p", [0.05, 0.1, 1 / 3, 0.9])
def test_values_are_those_of_torchs_dropout_with_that_mask(
    p: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = draw(dtype)
    torch.manual_seed(3)
    expected = F.dropout(x, p, True)
    torch.manual_seed(3)
    kept = F.dropout(torch.ones_like(x), p, True) != 0
    monkeypatch.setattr(dropout, "runs_triton", lambda *_: False)
    monkeypatch.setattr(dropout, "uniform", lambda index, seed: kept[index].float())
    assert torch.equal(seeded_dropout(x, p, 0), expected)


@every_dtype
def test_the_kernel_gives_the_bits_of_the_reference(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x = draw(dtype)
    ours = [seeded_dropout(x, 0.1, seed) for seed in (1, 2)]
    monkeypatch.setattr(dropout, "runs_triton", lambda *_: False)
    assert all(torch.equal(y, seeded_dropout(x, 0.1, seed)) for y, seed in zip(ours, (1, 2), strict=True))


@pytest.mark.real_device("streams")
def test_a_side_stream_is_used_where_it_is_current() -> None:
    value = draw()
    expected = seeded_dropout(value, 0.3, 1)
    x = torch.full_like(value, float("nan"))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # a kernel on any other stream would read the NaNs
        x.copy_(value)
        y = seeded_dropout(x, 0.3, 1)
    assert not stream.query(), "something waited for the stream"
    stream.synchronize()
    assert torch.equal(y, expected)


def test_nothing_waits_for_the_device() -> None:
    module, x = nn.Dropout(0.3), draw().requires_grad_()
    patch_dropout(module)
    module(x).sum().backward()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        module(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.real_device("CUDA graphs")
def test_replays_of_a_captured_graph_draw_masks_of_their_own() -> None:
    module, x = nn.Dropout(0.5), torch.ones(COUNT, device=DEVICE)
    patch_dropout(module)
    module(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = module(x)
    replays = []
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        replays.append(y.clone())
    assert not torch.equal(*replays)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_draws_the_same_mask_in_its_second_run(use_reentrant: bool) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.3), nn.Linear(64, 64)).to(DEVICE)
    patch_dropout(module[1])
    gradients = []
    for wrapped in (False, True):
        x = draw(torch.float32, 64 * 64).view(64, 64).requires_grad_()
        torch.manual_seed(1)
        y = checkpoint(module, x, use_reentrant=use_reentrant) if wrapped else module(x)
        gradients.append(torch.autograd.grad(y.square().sum(), x)[0] if not use_reentrant else _grad(y, x))
    assert torch.equal(*gradients)


def _grad(y: Tensor, x: Tensor) -> Tensor:
    y.square().sum().backward()
    assert x.grad is not None
    return x.grad


def test_a_forward_takes_the_memory_of_its_output_and_keeps_no_other() -> None:
    x = draw(count=size(2**24, 2**14)).requires_grad_()
    seeded_dropout(x, 0.3, 1)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = seeded_dropout(x, 0.3, 1)
    assert torch.cuda.max_memory_allocated() - before <= y.nbytes + 1024


@pytest.mark.real_device("tensors of more than 2^31 elements")
def test_elements_beyond_two_to_the_32_have_numbers_of_their_own() -> None:
    count, ends = 2**32 + 4096, 4096
    free, _ = torch.cuda.mem_get_info()
    if free < count * 2 * 2 * 1.1:
        pytest.skip(f"needs {count * 4.4 / 2**30:.0f} GiB of free GPU memory, {free / 2**30:.0f} GiB are")
    x = torch.ones(count, dtype=torch.bfloat16, device=DEVICE)
    y = seeded_dropout(x, 0.5, 1)
    index = torch.arange(count - ends, count, device=DEVICE)
    assert torch.equal(y[-ends:] != 0, dropout.uniform(index, 1) >= 0.5)
    assert torch.equal(y[:ends], seeded_dropout(x[:ends], 0.5, 1))
    assert not torch.equal(y[:ends], y[-ends:])
