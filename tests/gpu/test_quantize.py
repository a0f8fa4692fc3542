"""Codes on a real device: the bytes of the CPU, streams, graphs, synchronisation, very large tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memopt.kernels.quantize.layout import GROUP, Quantized
from memopt.kernels.quantize.quantize import _dequantize, _quantize, dequantize, quantize
from tests.gpu.sizes import size

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
COUNT = size(300 * 1000, 3000) + 7


def draw(dtype: torch.dtype = torch.bfloat16, count: int = COUNT, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator).to(DEVICE, dtype)


def assert_same(a: Quantized, b: Quantized) -> None:
    assert torch.equal(a.codes, b.codes)
    assert torch.equal(a.scales, b.scales)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("seed", [0, 2**63 + 5], ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e-38])
def test_codes_are_those_of_the_cpu(seed: int, dtype: torch.dtype, scale: float) -> None:
    x = draw(torch.float32).mul(scale).to(dtype)
    ours, theirs = quantize(x, seed), quantize(x.cpu(), seed)
    assert torch.equal(ours.codes.cpu(), theirs.codes)
    assert torch.equal(ours.scales.cpu(), theirs.scales)
    assert torch.equal(dequantize(ours).cpu(), dequantize(theirs))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_reference_gives_the_same_codes_on_the_device(dtype: torch.dtype) -> None:
    x = draw(dtype)
    ours = quantize(x, 1)
    codes, scales = _quantize(x, 1)
    assert torch.equal(ours.codes, codes)
    assert torch.equal(ours.scales, scales)
    assert torch.equal(dequantize(ours), _dequantize(codes, scales, dtype))


def test_groups_that_are_not_finite_are_nan_on_the_device_and_no_others() -> None:
    x = draw()
    x[5], x[7 * GROUP], x[-1] = float("nan"), float("inf"), -float("inf")
    groups = torch.arange(COUNT, device=DEVICE) // GROUP
    broken = (groups == 0) | (groups == 7) | (groups == groups[-1])
    assert torch.equal(dequantize(quantize(x, 1)).isnan(), broken)


@pytest.mark.real_device("streams")
def test_a_side_stream_is_used_where_it_is_current() -> None:
    value = draw()
    expected = quantize(value, 1)
    decoded = dequantize(expected)
    x = torch.full_like(value, float("nan"))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # a kernel on any other stream would read the NaNs
        x.copy_(value)
        ours = quantize(x, 1)
        ours_decoded = dequantize(ours)
    assert not stream.query(), "something waited for the stream"
    stream.synchronize()
    assert_same(ours, expected)
    assert torch.equal(ours_decoded, decoded)


@pytest.mark.real_device("CUDA graphs")
def test_a_captured_graph_replays_on_new_values() -> None:
    x = draw()
    dequantize(quantize(x, 1))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = quantize(x, 1)
        decoded = dequantize(captured)
    for seed in (1, 2):
        x.copy_(draw(seed=seed))
        graph.replay()
        torch.cuda.synchronize()
        assert_same(captured, quantize(x, 1))
        assert torch.equal(decoded, dequantize(captured))


def test_nothing_waits_for_the_device() -> None:
    x = draw()
    dequantize(quantize(x, 1))
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        dequantize(quantize(x, 2))
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_another_device_than_the_current_one_is_used() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = draw()
    with torch.cuda.device(0):
        other = quantize(x.to("cuda:1"), 1)
        decoded = dequantize(other)
    assert decoded.device.index == other.codes.device.index == 1
    assert torch.equal(decoded.to(x.device), dequantize(quantize(x, 1)))


def test_codes_take_no_more_memory_than_they_hold_while_they_are_made() -> None:
    x = draw(count=size(2**24, 2**14))
    quantize(x, 1)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    quantized = quantize(x, 1)
    made = quantized.codes.nbytes + quantized.scales.nbytes
    assert torch.cuda.max_memory_allocated() - before <= made + 1024


@pytest.mark.real_device("tensors of more than 2^31 elements")
def test_elements_beyond_two_to_the_32_are_coded_like_others_with_numbers_of_their_own() -> None:
    count, ends = 2**32 + 3 * GROUP, 3 * GROUP
    needed = count * (2 * 2 + 1) + count // GROUP * 8
    free, _ = torch.cuda.mem_get_info()
    if free < needed * 1.1:
        pytest.skip(f"needs {needed * 1.1 / 2**30:.0f} GiB of free GPU memory, {free / 2**30:.0f} GiB are")
    x = torch.zeros(count, dtype=torch.bfloat16, device=DEVICE)
    x[:ends] = x[-ends:] = draw(count=ends)
    quantized, alone = quantize(x, 1), quantize(x[:ends].clone(), 1)
    decoded = dequantize(quantized)
    assert torch.equal(decoded[:ends], dequantize(alone))
    step = quantized.scales[:, 1].amax()
    assert (decoded[-ends:].float() - x[-ends:].float()).abs().amax() <= 1.01 * step
    assert not decoded[ends:-ends].any()
    assert torch.equal(quantized.codes[:ends], alone.codes)
    assert not torch.equal(quantized.codes[-ends:], alone.codes)
