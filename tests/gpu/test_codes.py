"""Coded derivatives on a real device: the reference's bytes, streams, graphs, synchronisation, very large tensors.

Every layout and size is held against the reference in tests/triton, which runs on a GPU too.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memopt.kernels.derivative_codes.codes import _apply, _encode, apply_code, derivative_code, encode
from memopt.kernels.derivative_codes.schemes import RELU_MASK, DerivativeCode
from tests.gpu.sizes import size

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
COUNT = size(300 * 1000, 3000) + 7
CODES = {scheme: derivative_code("gelu_erf", scheme) for scheme in ("published", "2bit", "3bit", "4bit", "8bit")} | {
    "mask": RELU_MASK
}
every_code = pytest.mark.parametrize("code", CODES.values(), ids=CODES)


def draw(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def run(z: Tensor, dh: Tensor, code: DerivativeCode) -> list[Tensor]:
    packed = encode(z, code)
    return [packed, apply_code(dh, packed, code)]


def assert_same(results: list[Tensor], expected: list[Tensor]) -> None:
    for result, other in zip(results, expected, strict=True):
        assert torch.equal(result, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_code
def test_codes_and_gradients_are_those_of_the_reference_on_the_cpu(code: DerivativeCode, dtype: torch.dtype) -> None:
    z, dh = draw(dtype).mul(2), draw(dtype, seed=1)
    packed, dz = run(z, dh, code)
    expected = _encode(z.cpu(), code)
    if code.thresholds:
        assert torch.equal(packed.cpu(), expected)
    else:
        # The device's exponential and error function are others: a derivative between two levels may fall to either.
        ones = torch.ones(COUNT)
        levels, expected_levels = (_apply(ones, codes, code) for codes in (packed.cpu(), expected))
        difference = (levels - expected_levels).abs()
        assert difference.max() <= code.step * 1.001
        assert (difference > 0).float().mean() < 1e-3
    assert torch.equal(dz.cpu(), _apply(dh.cpu(), packed.cpu(), code))


@pytest.mark.real_device("programs that run at the same time")
@every_code
def test_ten_runs_give_the_same_bits(code: DerivativeCode) -> None:
    z, dh = draw(), draw(seed=1)
    first = run(z, dh, code)
    for _ in range(9):
        assert_same(run(z, dh, code), first)


@pytest.mark.real_device("streams")
@every_code
def test_a_side_stream_is_used_where_it_is_current(code: DerivativeCode) -> None:
    z, dh = draw(), draw(seed=1)
    expected = run(z, dh, code)
    value = z.clone()
    z.fill_(float("nan"))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # a kernel on any other stream would read the NaNs
        z.copy_(value)
        results = run(z, dh, code)
    assert not stream.query(), "something waited for the stream"
    stream.synchronize()
    assert_same(results, expected)


@pytest.mark.real_device("CUDA graphs")
@every_code
def test_a_captured_graph_replays_on_new_values(code: DerivativeCode) -> None:
    z, dh = draw(), draw(seed=1)
    run(z, dh, code)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run(z, dh, code)
    z.copy_(draw(seed=2))
    dh.copy_(draw(seed=3))
    graph.replay()
    assert_same(results, run(z, dh, code))


@every_code
def test_nothing_waits_for_the_device_not_even_the_first_time(code: DerivativeCode) -> None:
    z, dh = draw(), draw(seed=1)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(z, dh, code)
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_another_device_than_the_current_one_is_used() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    z, dh = draw(), draw(seed=1)
    expected = run(z, dh, CODES["3bit"])
    with torch.cuda.device(0):
        results = run(z.to("cuda:1"), dh.to("cuda:1"), CODES["3bit"])
    assert_same([result.to(DEVICE) for result in results], expected)


@pytest.mark.real_device("tensors of more than 2^31 elements")
@pytest.mark.parametrize("scheme", ["2bit", "3bit", "8bit"])
def test_elements_beyond_two_to_the_31_are_as_any_others(scheme: str) -> None:
    code, count, part = CODES[scheme], 2**31 + 4096, 8192
    free, _ = torch.cuda.mem_get_info()
    needed = count * (2 * torch.bfloat16.itemsize + 1)
    if free < needed * 1.1:
        pytest.skip(f"needs {needed * 1.1 / 2**30:.0f} GiB of free GPU memory, {free / 2**30:.0f} GiB are")
    z = torch.randn(count, device=DEVICE, dtype=torch.bfloat16)
    z[-1] = float("nan")
    packed = encode(z, code)
    dz = apply_code(z, packed, code)
    for where in (slice(0, part), slice(count - part, count)):
        few = z[where].clone()
        few_packed = encode(few, code)
        torch.testing.assert_close(dz[where], apply_code(few, few_packed, code), rtol=0, atol=0, equal_nan=True)
    code_bytes = code.code_bytes(count)
    assert torch.equal(packed[code_bytes - code.code_bytes(part) : code_bytes], few_packed[: code.code_bytes(part)])
    assert packed[code_bytes:].sum() == packed[-1] == 1
