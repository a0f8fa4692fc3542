"""What only a real device shows of the operators: streams, graphs, synchronisation, races, very large tensors.

Values are held against the references in tests/triton, which runs on a GPU too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import memopt
from memopt.kernels.activation.function import recomputed_activation
from memopt.kernels.gated_mlp.function import gated_product, gated_product_fused
from memopt.kernels.linear.function import linear
from memopt.kernels.norm.function import NormSpec, ms_norm
from tests.factories import tiny_inputs, tiny_model
from tests.gpu.sizes import size
from tests.support.launches import count_launches, operators

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
RMS, LAYER = NormSpec("rms", 1e-6, cast="before"), NormSpec("layer", 1e-6)
TOKENS, HIDDEN = size(300, 12), 1000


@dataclass(frozen=True)
class Operator:
    """A differentiable function of tensors whose shapes are given in tokens (t) and hidden (h)."""

    function: Callable[..., Tensor]
    shapes: tuple[str, ...]

    def inputs(
        self, dtype: torch.dtype = torch.bfloat16, tokens: int = TOKENS, hidden: int = HIDDEN, seed: int = 0
    ) -> list[Tensor]:
        generator = torch.Generator(DEVICE).manual_seed(seed)
        sizes = {"t": tokens, "h": hidden, "2h": 2 * hidden, "o": 64}
        shapes = [tuple(sizes[size] for size in shape.split()) for shape in self.shapes]
        return [
            torch.randn(shape, generator=generator, device=DEVICE, dtype=dtype).requires_grad_() for shape in shapes
        ]

    def gradient(self, inputs: list[Tensor], seed: int = 9) -> Tensor:
        """A random incoming gradient."""
        with torch.no_grad():
            y = self.function(*inputs)
        return torch.randn(y.shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE).to(y.dtype)

    def run(self, inputs: list[Tensor], dy: Tensor) -> list[Tensor]:
        """The value and the gradient of every input."""
        y = self.function(*inputs)
        return [y.detach(), *torch.autograd.grad(y, inputs, dy)]


OPERATORS = {
    "rms norm": Operator(lambda x, w: ms_norm(x, w, None, RMS, x.dtype), ("t h", "h")),
    "layer norm": Operator(lambda x, w, b: ms_norm(x, w, b, LAYER, x.dtype), ("t h", "h", "h")),
    "rms norm, no affine": Operator(lambda x: ms_norm(x, None, None, RMS, x.dtype), ("t h",)),
    "layer norm, no affine": Operator(lambda x: ms_norm(x, None, None, LAYER, x.dtype), ("t h",)),
    "gated product": Operator(lambda gate, up: gated_product(gate, up, "silu"), ("t h", "t h")),
    "gated product, halves": Operator(lambda x: gated_product_fused(x, "gelu_tanh", True), ("t 2h",)),
    "gated linear": Operator(
        lambda gate, up, w: linear(gated_product(gate, up, "silu"), w, None), ("t h", "t h", "o h")
    ),
    "activation": Operator(
        lambda z: recomputed_activation(z, lambda z: z * torch.sigmoid(1.702 * z), "quick_gelu"), ("t h",)
    ),
}
#: Their rows do not depend on the number of rows, nor on a library that chooses its own algorithm by size.
ROWWISE = [name for name in OPERATORS if name != "gated linear"]
every_operator = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)


def assert_same(results: list[Tensor], expected: list[Tensor]) -> None:
    for result, other in zip(results, expected, strict=True):
        assert torch.equal(result, other)


@pytest.mark.real_device("programs that run at the same time")
@every_operator
def test_ten_runs_give_the_same_bits(operator):
    inputs = operator.inputs(tokens=4099)
    dy = operator.gradient(inputs)
    first = operator.run(inputs, dy)
    for _ in range(9):
        assert_same(operator.run(inputs, dy), first)


@pytest.mark.real_device("streams")
@every_operator
def test_a_side_stream_is_used_where_it_is_current(operator):
    inputs, dy = operator.inputs(), operator.gradient(operator.inputs())
    expected = operator.run(inputs, dy)
    values = [tensor.detach().clone() for tensor in inputs]
    for tensor in inputs:
        tensor.data.fill_(float("nan"))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # a kernel on any other stream would read the NaNs
        for tensor, value in zip(inputs, values, strict=True):
            tensor.data.copy_(value)
        results = operator.run(inputs, dy)
    assert not stream.query(), "something waited for the stream"
    stream.synchronize()
    assert_same(results, expected)


@pytest.mark.real_device("CUDA graphs")
@every_operator
def test_a_captured_graph_replays_forward_and_backward_on_new_values(operator):
    inputs = operator.inputs()
    dy = operator.gradient(inputs)
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        for _ in range(3):
            operator.run(inputs, dy)
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = operator.run(inputs, dy)
    for seed in (1, 2):
        for tensor, value in zip(inputs, operator.inputs(seed=seed), strict=True):
            tensor.data.copy_(value.detach())
        dy.copy_(operator.gradient(inputs, seed=seed + 10))
        graph.replay()
        torch.cuda.synchronize()
        assert_same(results, operator.run(inputs, dy))


@every_operator
def test_nothing_waits_for_the_device(operator):
    inputs = operator.inputs()
    dy = operator.gradient(inputs)
    operator.run(inputs, dy)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        operator.run(inputs, dy)
    finally:
        torch.cuda.set_sync_debug_mode(before)


@every_operator
def test_a_retained_graph_gives_the_same_gradients_again_and_leaves_its_inputs_alone(operator):
    inputs = operator.inputs()
    dy = operator.gradient(inputs)
    values = [tensor.detach().clone() for tensor in (*inputs, dy)]
    y = operator.function(*inputs)
    first = torch.autograd.grad(y, inputs, dy, retain_graph=True)
    assert_same(list(torch.autograd.grad(y, inputs, dy)), list(first))
    assert_same([tensor.detach() for tensor in (*inputs, dy)], values)


@pytest.mark.real_device("torch.compile on the device")
@every_operator
def test_the_compiler_takes_it_in_one_graph_with_the_same_results(operator):
    torch._dynamo.reset()
    inputs = operator.inputs()
    dy = operator.gradient(inputs)
    compiled = Operator(torch.compile(operator.function, fullgraph=True), operator.shapes)
    for result, expected in zip(compiled.run(inputs, dy), operator.run(inputs, dy), strict=True):
        if operator is OPERATORS["gated linear"]:  # the compiler may choose another algorithm for a matrix product
            distance = (result.double() - expected.double()).norm() / expected.double().norm()
            assert distance <= 2 * torch.finfo(result.dtype).eps
        else:
            assert torch.equal(result, expected)


@every_operator
def test_autocast_does_not_change_gradient_dtypes(operator):
    inputs = operator.inputs(torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        y = operator.function(*inputs)
        gradients = torch.autograd.grad(y, inputs, torch.ones_like(y))
    assert y.dtype == (torch.bfloat16 if operator is OPERATORS["gated linear"] else torch.float32)
    assert all(gradient.dtype == torch.float32 and gradient.isfinite().all() for gradient in gradients)


@every_operator
def test_another_device_than_the_current_one_is_used(operator):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    inputs = operator.inputs()
    dy = operator.gradient(inputs)
    moved = [tensor.detach().to("cuda:1").requires_grad_() for tensor in inputs]
    with torch.cuda.device(0):
        results = operator.run(moved, dy.to("cuda:1"))
    assert all(result.device.index == 1 for result in results)
    for result, expected in zip(results, operator.run(inputs, dy), strict=True):
        torch.testing.assert_close(result.to(expected.device), expected)


@pytest.mark.real_device("tensors of more than 2^31 elements")
@pytest.mark.parametrize("name", ROWWISE)
def test_rows_beyond_two_to_the_31_elements_are_as_any_other_rows(name):
    operator, hidden, ends = OPERATORS[name], 4096, 8
    tokens = 2**31 // hidden + ends
    widths = [2 if "2h" in shape else 1 for shape in operator.shapes if shape.startswith("t")]
    # Inputs and their gradients, the incoming gradient, the value, x_hat, and one to spare.
    needed = (2 * sum(widths) + 4) * tokens * hidden * torch.bfloat16.itemsize
    free, _ = torch.cuda.mem_get_info()
    if free < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of free GPU memory, {free / 2**30:.0f} GiB are")
    inputs = operator.inputs(tokens=tokens, hidden=hidden)
    rows = [tensor for tensor in inputs if tensor.dim() == 2]
    dy = torch.randn(tokens, hidden, device=DEVICE, dtype=torch.bfloat16)
    y = operator.function(*inputs)
    gradients = torch.autograd.grad(y, rows, dy)
    for part in (slice(0, ends), slice(tokens - ends, tokens)):
        few = [(t[part] if t.dim() == 2 else t).detach().clone().requires_grad_() for t in inputs]
        few_rows = [tensor for tensor in few if tensor.dim() == 2]
        few_y = operator.function(*few)
        expected = [few_y.detach(), *torch.autograd.grad(few_y, few_rows, dy[part].clone())]
        assert_same([tensor[part].detach() for tensor in (y, *gradients)], expected)


@pytest.fixture
def launches(monkeypatch):
    """How often each operator's launchers are called."""
    return count_launches(monkeypatch)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", {"norm", "gated_mlp"}),
        ("phi3", {"norm", "gated_mlp"}),
        ("gemma2", {"norm", "gated_mlp"}),
        ("gpt2", {"norm", "activation"}),
        ("bert", {"norm"}),
        ("vit", {"norm"}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.rotates(3)
def test_patched_models_run_the_kernels(launches, name, expected, dtype):
    model = tiny_model(name, dtype).to(DEVICE)
    inputs = {key: value.to(DEVICE) for key, value in tiny_inputs(name, 2, 16, dtype=dtype).items()}
    memopt.patch(model)
    launches.clear()  # patching proves modules with the operators themselves
    model(**inputs).loss.backward()
    assert expected <= operators(launches)


def test_the_switch_in_the_environment_turns_the_kernels_off(launches, monkeypatch):
    from memopt.kernels.base import device

    monkeypatch.setenv("MEMOPT_TRITON", "0")
    device._triton_is_there.cache_clear()
    try:
        gate = torch.randn(8, 64, device=DEVICE, requires_grad=True)
        h = gated_product(gate, gate, "silu")
        h.sum().backward()
    finally:
        monkeypatch.undo()
        device._triton_is_there.cache_clear()
    assert not launches
    torch.testing.assert_close(h, F.silu(gate) * gate)


def test_gradients_of_fp32_weights_under_autocast_are_rounded_to_fp32_alone():
    """A product and a sum of 16 bits with an fp32 result: stock's are rounded to 16 bits and cast."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE, dtype=dtype)

    x, gamma = draw(TOKENS, 64, dtype=torch.bfloat16).requires_grad_(), draw(64, dtype=torch.bfloat16).requires_grad_()
    weight, bias, dy = draw(96, 64).requires_grad_(), draw(96).requires_grad_(), draw(TOKENS, 96, dtype=torch.bfloat16)
    with torch.autocast(DEVICE, torch.bfloat16):
        y = ms_norm(x, gamma, None, RMS, torch.bfloat16)
        found = torch.autograd.grad(linear(y, weight, bias), (weight, bias), dy)
    wide, read = dy.double(), y.detach().double()
    truth = wide.t() @ read, wide.sum(0)
    terms = wide.abs().t() @ read.abs(), wide.abs().sum(0)
    for ours, exact, most in zip(found, truth, terms, strict=True):
        assert ours.dtype == torch.float32
        assert ((ours.double() - exact).abs() <= TOKENS * torch.finfo(torch.float32).eps * most).all()
