"""Sampled rows on a real device: values, streams, graphs, synchronisation, memory, and draws that can be repeated.

Every layout and size is held against the reference in tests/triton, which runs on a GPU too.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memopt.kernels.sampled_linear.function import (
    _row_norms,
    _weight_gradient,
    gather_rows,
    row_norms,
    sampled_weight_gradient,
)
from memopt.kernels.sampled_linear.sampling import METHODS, Method, sample_rows
from tests.gpu.sizes import size
from tests.triton.accuracy import assert_as_accurate

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ROWS, KEPT, IN, OUT = size(2000, 200), size(601, 61), size(1536, 96), size(4100, 132)
every_method = pytest.mark.parametrize("method", METHODS)


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def scores(n: int = ROWS) -> Tensor:
    return draw(n, dtype=torch.float32).mul(2).exp()


def seeded(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def run(x: Tensor, dy: Tensor, method: Method = "systematic") -> list[Tensor]:
    """All that a step does, with the device's default generator."""
    norms = row_norms(x)
    rows, weights = sample_rows(norms.double() * row_norms(dy).double(), KEPT, method)
    kept = gather_rows(x, rows)
    return [norms, rows, weights, kept, sampled_weight_gradient(dy, kept, rows, weights)]


def tensors(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    return draw(ROWS, IN, dtype=dtype), draw(ROWS, OUT, dtype=dtype, seed=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_are_those_of_the_reference(dtype: torch.dtype) -> None:
    x, dy = tensors(dtype)
    norms, rows, weights, kept, dw = run(x, dy)
    torch.testing.assert_close(norms, _row_norms(x))
    assert torch.equal(kept, x[rows.long()])
    truth = (dy[rows.long()].double() * weights.double()[:, None]).t() @ kept.double()
    assert_as_accurate(dw, _weight_gradient(dy, kept, rows, weights), truth)


@every_method
@pytest.mark.parametrize("n", [100, ROWS, 2**20])
@pytest.mark.rotates(3)
def test_the_same_seed_draws_the_same_rows_ten_times(n: int, method: Method) -> None:
    first = sample_rows(scores(n), n // 3, method, seeded(3))
    for _ in range(9):
        assert all(map(torch.equal, first, sample_rows(scores(n), n // 3, method, seeded(3))))
    assert not torch.equal(first[0], sample_rows(scores(n), n // 3, method, seeded(4))[0])


@every_method
def test_draws_are_sound_on_the_device(method: Method) -> None:
    w = scores() * (draw(ROWS, dtype=torch.float32, seed=2) > -0.5)
    for seed in range(20):
        rows, weights = sample_rows(w, KEPT, method, seeded(seed))
        assert ((rows >= 0) & (rows < ROWS)).all()
        assert (w[rows.long()][weights > 0] > 0).all()
        if method in ("systematic", "uniform"):
            assert len(rows.unique()) == KEPT
        if method != "uniform":
            total = (weights.double() * w.double()[rows.long()]).sum() / w.double().sum()
            assert float(total) == pytest.approx(1, abs=2**-23)


@every_method
def test_deterministic_mode_lets_the_sampler_run(method: Method) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        sample_rows(scores(), KEPT, method)
    finally:
        torch.use_deterministic_algorithms(False)


@every_method
def test_nothing_waits_for_the_device(method: Method) -> None:
    x, dy = tensors()
    run(x, dy, method)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(x, dy, method)
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.real_device("programs that run at the same time")
def test_ten_runs_give_the_same_bits() -> None:
    x, dy = tensors()
    torch.manual_seed(0)
    first = run(x, dy)
    for _ in range(9):
        torch.manual_seed(0)
        assert all(map(torch.equal, first, run(x, dy)))


@pytest.mark.real_device("streams")
@every_method
def test_a_side_stream_is_used_where_it_is_current(method: Method) -> None:
    x, dy = tensors()
    torch.manual_seed(0)
    expected = run(x, dy, method)
    value = x.clone()
    x.fill_(float("nan"))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # a kernel on any other stream would read the NaNs
        x.copy_(value)
        torch.manual_seed(0)
        results = run(x, dy, method)
    assert not stream.query(), "something waited for the stream"
    stream.synchronize()
    assert all(map(torch.equal, results, expected))


@pytest.mark.real_device("CUDA graphs")
@every_method
def test_a_captured_graph_draws_anew_from_new_values(method: Method) -> None:
    x, dy = tensors()
    run(x, dy, method)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norms, rows, weights, kept, dw = run(x, dy, method)
    drawn = []
    for seed in (2, 3):
        x.copy_(draw(ROWS, IN, seed=seed))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(norms, row_norms(x))
        assert torch.equal(kept, x[rows.long()])
        assert torch.equal(dw, sampled_weight_gradient(dy, kept, rows, weights))
        drawn.append(rows.clone())
    assert not torch.equal(*drawn)


def test_the_gradient_takes_no_memory_beside_itself() -> None:
    x, dy = tensors()
    *_, rows, weights, kept, _ = run(x, dy)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    dw = sampled_weight_gradient(dy, kept, rows, weights)
    assert torch.cuda.max_memory_allocated() - before <= dw.nbytes + 1024


def test_another_device_than_the_current_one_is_used() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x, dy = tensors()
    torch.manual_seed(0)
    expected = run(x, dy)
    with torch.cuda.device(0):
        torch.manual_seed(0)
        results = run(x.to("cuda:1"), dy.to("cuda:1"))
    assert all(torch.equal(result.to(DEVICE), other) for result, other in zip(results, expected, strict=True))
