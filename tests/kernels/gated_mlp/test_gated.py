"""The gated product and the linear behind it against stock modules: bits, gradients, kept tensors, compositions."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck
from torch.autograd.graph import saved_tensors_hooks
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from memopt.kernels.gated_mlp.function import gated_product, gated_product_fused, product_backward_op, product_op
from memopt.kernels.linear.function import linear
from memopt.saved import RecomputeScope
from memopt.torch_compat.activations import ACTIVATIONS
from tests.support.compare import all_equal

TOKENS, INTERMEDIATE, HIDDEN = 5, 12, 4


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def make(dtype: torch.dtype = torch.float32, leading: tuple[int, ...] = (2, TOKENS)) -> list[Tensor]:
    """gate, up, weight, bias"""
    return [
        draw(*leading, INTERMEDIATE, dtype=dtype, seed=0),
        draw(*leading, INTERMEDIATE, dtype=dtype, seed=1),
        draw(HIDDEN, INTERMEDIATE, dtype=dtype, seed=2),
        draw(HIDDEN, dtype=dtype, seed=3),
    ]


def gated_linear(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    return linear(gated_product(gate, up, kind), weight, bias)


def gated_linear_fused(both: Tensor, weight: Tensor, bias: Tensor | None, kind: str, gate_first: bool) -> Tensor:
    return linear(gated_product_fused(both, kind, gate_first), weight, bias)


def gradients(y: Tensor, inputs: list[Tensor], dy: Tensor | None = None, **options: bool) -> list[Tensor]:
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).to(y.dtype) if dy is None else dy
    return list(torch.autograd.grad(y, inputs, dy, **options))


def halves(gate: Tensor, up: Tensor, gate_first: bool) -> Tensor:
    return torch.cat([gate, up] if gate_first else [up, gate], -1).detach().requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", sorted(ACTIVATIONS))
def test_the_product_and_its_gradients_are_bitwise_the_stock_ones(kind, dtype):
    gate, up, *_ = make(dtype)
    stock, ours = ACTIVATIONS[kind].value(gate) * up, gated_product(gate, up, kind)
    assert torch.equal(stock, ours)
    assert all_equal(gradients(stock, [gate, up]), gradients(ours, [gate, up]))


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("leading", [(), (7,), (2, 5), (1, 2, 3), (0,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_linear_and_its_gradients_are_bitwise_the_stock_ones(dtype, leading, has_bias):
    gate, up, weight, bias = make(dtype, leading)
    inputs = [gate, up, weight, bias][: 4 if has_bias else 3]
    bias = bias if has_bias else None
    stock, ours = F.linear(F.silu(gate) * up, weight, bias), gated_linear(gate, up, weight, bias, "silu")
    assert torch.equal(stock, ours)
    assert all_equal(gradients(stock, inputs), gradients(ours, inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gate_first", [True, False])
def test_halves_of_one_tensor_give_what_the_stock_module_makes_of_them(gate_first, dtype):
    gate, up, weight, bias = make(dtype)
    both = halves(gate, up, gate_first)
    first, second = both.chunk(2, -1)
    stock_h = F.silu(first) * second if gate_first else F.silu(second) * first
    stock_y = F.linear(stock_h, weight, bias)
    h = gated_product_fused(both, "silu", gate_first)
    y = gated_linear_fused(both, weight, bias, "silu", gate_first)
    for stock, ours, inputs in ((stock_h, h, [both]), (stock_y, y, [both, weight, bias])):
        assert torch.equal(stock, ours)
        results = gradients(ours, inputs)
        assert results[0].is_contiguous()
        assert all_equal(gradients(stock, inputs, retain_graph=True), results)


@pytest.mark.parametrize("kind", sorted(ACTIVATIONS))
def test_gradients_are_right_in_fp64(kind):
    gate, up, weight, bias = make(torch.float64, (3,))
    assert gradcheck(lambda *t: gated_product(*t, kind), (gate, up))
    assert gradcheck(lambda *t: gated_linear(*t, kind), (gate, up, weight, bias))
    both = halves(gate, up, False)
    assert gradcheck(lambda t: gated_product_fused(t, kind, False), (both,))
    assert gradcheck(lambda *t: gated_linear_fused(*t, kind, False), (both, weight, bias))


def test_different_dtypes_of_gate_and_up_promote_as_in_the_stock_product():
    gate, up, *_ = make()
    up = up.detach().bfloat16().requires_grad_()
    for a, b in ((gate, up), (up, gate)):
        stock, ours = F.silu(a) * b, gated_product(a, b, "silu")
        assert torch.equal(stock, ours)
        assert all_equal(gradients(stock, [a, b]), gradients(ours, [a, b]))


def kept_shapes(function) -> list[tuple[int, ...]]:
    """Shapes of the tensors that are kept, each storage once."""
    kept: dict[int, tuple[int, ...]] = {}
    with saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), tuple(t.shape)) and t, lambda t: t):
        function()
    return list(kept.values())


def test_gate_and_up_are_kept_and_nothing_else_of_their_size():
    gate, up, weight, bias = make()
    rows, matrix = tuple(gate.shape), tuple(weight.shape)
    both = halves(gate, up, True)
    assert kept_shapes(lambda: gated_product(gate, up, "silu")) == [rows, rows]
    assert kept_shapes(lambda: gated_linear(gate, up, weight, bias, "silu")) == [rows, rows, matrix]
    assert kept_shapes(lambda: gated_linear_fused(both, weight, bias, "silu", True)) == [tuple(both.shape), matrix]


def test_the_weight_is_kept_itself_and_not_a_copy():
    gate, up, weight, _ = make()
    kept = []
    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        gated_linear(gate, up, weight, None, "silu")
    assert any(tensor is weight for tensor in kept)


FROZEN = ["gate", "up", "weight", "bias"]


@pytest.mark.parametrize("needed", ["gate up", "weight", "bias", "gate", "up bias"])
def test_only_what_needs_a_gradient_gets_one(needed):
    inputs = make()
    for name, tensor in zip(FROZEN, inputs, strict=True):
        tensor.requires_grad_(name in needed.split())
    leaves = [tensor for tensor in inputs if tensor.requires_grad]
    gate, up, weight, bias = inputs
    stock = F.linear(F.silu(gate) * up, weight, bias)
    ours = gated_linear(gate, up, weight, bias, "silu")
    assert all_equal(gradients(stock, leaves), gradients(ours, leaves))


def test_a_frozen_weight_costs_neither_its_gradient_nor_the_product():
    gate, up, weight, _ = make()
    y = gated_linear(gate, up, weight.detach(), None, "silu")
    with torch.profiler.profile() as profile:
        gradients(y, [gate, up])
    names = [event.name for event in profile.events()]
    assert names.count("aten::mm") == 1
    assert names.count("aten::mul") == 2


def test_a_second_backward_gives_the_same_and_no_gradient_is_written_to():
    gate, up, weight, bias = inputs = make()
    for result in (gated_product(gate, up, "silu"), gated_linear(gate, up, weight, bias, "silu")):
        leaves = inputs if result.size(-1) == HIDDEN else inputs[:2]
        dy = torch.randn(result.shape)
        before = dy.clone()
        first = gradients(result, leaves, dy, retain_graph=True)
        assert all_equal(first, gradients(result, leaves, dy, retain_graph=True))
        assert torch.equal(dy, before)


def test_expanded_and_strided_gradients_are_read_right():
    gate, up, weight, bias = inputs = make()
    for dy in (torch.ones(()).expand(2, TOKENS, HIDDEN), torch.randn(HIDDEN, TOKENS, 2).permute(2, 1, 0)):
        y = gated_linear(gate, up, weight, bias, "silu")
        expected = gradients(y, inputs, dy.contiguous(), retain_graph=True)
        for ours, exact in zip(gradients(y, inputs, dy), expected, strict=True):
            torch.testing.assert_close(ours, exact)


@pytest.mark.parametrize("kind", ["silu", "mish", "softplus", "relu2"])
@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [torch.float32, torch.bfloat16], ids=str)
def test_under_autocast_everything_is_as_in_the_stock_module(rows, parameters, kind):
    gate, up, *_ = make(rows)
    _, _, weight, bias = make(parameters)
    with torch.autocast("cpu", torch.bfloat16):
        stock = F.linear(ACTIVATIONS[kind].value(gate) * up, weight, bias)
        ours = gated_linear(gate, up, weight, bias, kind)
        both = gated_linear_fused(halves(gate, up, True), weight, bias, kind, True)
    assert stock.dtype == ours.dtype == torch.bfloat16
    assert torch.equal(stock, ours)
    assert torch.equal(stock, both)
    expected = gradients(stock, [gate, up, weight, bias])
    assert all_equal(expected, gradients(ours, [gate, up, weight, bias], retain_graph=True))
    with torch.autocast("cpu", torch.bfloat16):
        assert all_equal(expected, gradients(ours, [gate, up, weight, bias]))


def test_a_backward_that_is_run_under_autocast_computes_in_the_dtypes_of_the_forward():
    inputs = make()
    y = gated_linear(*inputs, "silu")
    expected = gradients(y, inputs, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert all_equal(expected, gradients(y, inputs))


def test_under_autocast_fp64_stays_as_it_is():
    inputs = make(torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        stock = F.linear(F.silu(inputs[0]) * inputs[1], *inputs[2:])
        ours = gated_linear(*inputs, "silu")
    assert torch.equal(stock, ours)
    assert all_equal(gradients(stock, inputs), gradients(ours, inputs))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("scoped", [True, False])
def test_under_checkpointing_the_gradients_are_the_same(scoped, reentrant):
    inputs = make()

    def function(*tensors: Tensor) -> Tensor:
        with RecomputeScope() if scoped else nullcontext():
            gate, up, weight, bias = tensors
            return gated_linear(gate, up, weight, bias, "silu") + F.linear(gated_product(gate, up, "silu"), weight)

    def leaf_gradients(y: Tensor) -> list[Tensor]:
        for t in inputs:
            t.grad = None
        y.square().sum().backward()
        return [t.grad for t in inputs]

    expected = leaf_gradients(function(*inputs))
    assert all_equal(expected, leaf_gradients(checkpoint(function, *inputs, use_reentrant=reentrant)))


@pytest.mark.parametrize("fused", [True, False])
def test_inside_a_scope_a_reader_keeps_a_handle_of_the_product(fused):
    gate, up, weight, bias = make()
    both = halves(gate, up, True)

    def pack(tensor: Tensor) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor.detach()

    pack.memopt_observer = True
    results = []
    for scope in (nullcontext, RecomputeScope):
        shapes: list[tuple[int, ...]] = []
        with saved_tensors_hooks(pack, lambda t: t), scope():
            h = gated_product_fused(both, "silu", True) if fused else gated_product(gate, up, "silu")
            y = F.linear(h, weight, bias)
        # The linear keeps its input as rows of a matrix.
        product_kept = shapes.count((2 * TOKENS, INTERMEDIATE))
        results.append((product_kept, gradients(y, [both, weight] if fused else [gate, up, weight])))
    assert [kept for kept, _ in results] == [1, 0]
    assert all_equal(results[0][1], results[1][1])


@pytest.mark.parametrize("device", ["meta", "fake"])
def test_tensors_without_memory_pass_through_in_both_directions(device):
    with FakeTensorMode() if device == "fake" else nullcontext():
        options = {"device": "cpu" if device == "fake" else device, "dtype": torch.bfloat16, "requires_grad": True}
        gate, up = (torch.empty(2, 5, 12, **options) for _ in range(2))
        both, weight, bias = torch.empty(2, 5, 24, **options), torch.empty(4, 12, **options), torch.empty(4, **options)
        for y, inputs in (
            (gated_linear(gate, up, weight, bias, "silu"), [gate, up, weight, bias]),
            (gated_linear_fused(both, weight, bias, "silu", False), [both, weight, bias]),
        ):
            assert y.shape == (2, 5, 4)
            for gradient, tensor in zip(torch.autograd.grad(y.sum(), inputs), inputs, strict=True):
                assert (gradient.shape, gradient.dtype) == (tensor.shape, tensor.dtype)


def test_a_double_backward_is_an_error():
    gate, up, weight, _ = make()
    for y in (gated_product(gate, up, "silu"), gated_linear(gate, up, weight, None, "silu")):
        with pytest.raises(RuntimeError, match="create_graph"):
            torch.autograd.grad(y.sum(), gate, create_graph=True)


def test_gate_and_up_of_different_shapes_are_an_error():
    gate, up, weight, _ = make()
    with pytest.raises(ValueError, match="different shapes"):
        gated_product(gate, up[:1], "silu")
    with pytest.raises(ValueError, match="different shapes"):
        gated_linear(gate, up[:1], weight, None, "silu")
    with pytest.raises(ValueError, match="halves"):
        gated_product_fused(gate[..., :5], "silu", True)


class GatedMLP(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = torch.nn.Linear(HIDDEN, INTERMEDIATE), torch.nn.Linear(HIDDEN, INTERMEDIATE)
        self.down = torch.nn.Linear(INTERMEDIATE, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return gated_linear(self.gate(x), self.up(x), self.down.weight, self.down.bias, "gelu_tanh")


class StockMLP(GatedMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.gate(x), approximate="tanh") * self.up(x))


@pytest.mark.parametrize("dynamic", [False, True])
def test_it_compiles_into_one_graph(dynamic):
    torch.compiler.reset()
    torch.manual_seed(0)
    ours = GatedMLP()
    stock = StockMLP()
    stock.load_state_dict(copy.deepcopy(ours.state_dict()))
    compiled = torch.compile(ours, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (3, 6):
        x = torch.randn(rows, HIDDEN)
        for model in (compiled, stock):
            model.zero_grad()
            model(x).square().sum().backward()
        for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("gate_first", [True, False])
def test_the_product_of_halves_compiles_into_one_graph(gate_first):
    torch.compiler.reset()
    gate, up, *_ = make()
    both = halves(gate, up, gate_first)
    compiled = torch.compile(gated_product_fused, fullgraph=True, backend="aot_eager")
    stock, ours = gated_product_fused(both, "silu", gate_first), compiled(both, "silu", gate_first)
    assert torch.equal(stock, ours)
    assert all_equal(gradients(stock, [both]), gradients(ours, [both]))


LAYOUTS = {
    "contiguous": lambda: make(leading=(3,))[:2],
    "transposed": lambda: [torch.randn(INTERMEDIATE, 3).t() for _ in range(2)],
    "halves": lambda: list(torch.randn(3, 2 * INTERMEDIATE).chunk(2, -1)),
    "gate in bf16": lambda: [torch.randn(3, INTERMEDIATE).bfloat16(), torch.randn(3, INTERMEDIATE)],
    "up in bf16": lambda: [torch.randn(3, INTERMEDIATE), torch.randn(3, INTERMEDIATE).bfloat16()],
    "empty": lambda: [torch.randn(0, INTERMEDIATE) for _ in range(2)],
}
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_operators_keep_the_promises_of_their_fake_kernels(layout):
    gate, up = LAYOUTS[layout]()
    dh = torch.randn(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))
    opcheck(product_op, (gate.detach().requires_grad_(), up.detach().requires_grad_(), "silu"), test_utils=CHECKS)
    for recompute in (True, False):
        opcheck(product_backward_op, (dh, gate.detach(), up.detach(), "silu", True, recompute), test_utils=CHECKS)


def test_the_fused_operators_keep_the_promises_of_their_fake_kernels():
    both, dh = draw(3, 2 * INTERMEDIATE), torch.randn(3, INTERMEDIATE)
    opcheck(product_op, (both, None, "silu", False), test_utils=CHECKS)
    opcheck(product_backward_op, (dh, both.detach(), None, "silu", False, True), test_utils=CHECKS)
