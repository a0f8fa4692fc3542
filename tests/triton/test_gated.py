"""The gated product's kernels against the formula in fp64, on every layout that a launcher takes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from memopt.kernels.gated_mlp import function_triton
from memopt.kernels.gated_mlp.function import gated_product, gated_product_fused
from memopt.kernels.gated_mlp.function_triton import launch_backward, launch_forward
from memopt.kernels.linear.function import linear
from memopt.saved import RecomputeScope
from memopt.torch_compat.activations import ACTIVATIONS
from tests.triton.accuracy import assert_as_accurate, assert_same_special_values
from tests.triton.conftest import DEVICE
from tests.triton.memory import RedZones, lazily_huge
from tests.triton.passes import assert_the_first_of_two_takes_one_more

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = sorted(ACTIVATIONS)


def draw(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(DEVICE, dtype)


def plain(dh: Tensor, gate: Tensor, up: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """dgate, dup and h as autograd computes them for the stock module, in the dtype of the tensors."""
    activated = ACTIVATIONS[kind].value(gate)
    return ACTIVATIONS[kind].gradient(dh * up, gate), dh * activated, activated * up


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("scale", [1e-2, 4.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_all_results_are_as_accurate_as_pytorchs(kind: str, dtype: torch.dtype, scale: float) -> None:
    gate, up, dh = (draw(2003, dtype=dtype, scale=s, seed=i) for i, s in enumerate((scale, 1.0, 1.0)))
    truth = plain(dh.double(), gate.double(), up.double(), kind)
    reference = plain(dh, gate, up, kind)
    ours = launch_backward(dh, gate, up, kind, True, None)
    for candidate, stock, exact in zip(ours, reference, truth, strict=True):
        assert_as_accurate(candidate, stock, exact)
    assert torch.equal(launch_forward(gate, up, kind), ours[2])


def check_layout(dh: Tensor, gate: Tensor, up: Tensor) -> None:
    """What a launcher gives must not depend on where the elements lie: the reference is one long contiguous launch,
    whose accuracy the first test holds against PyTorch's."""
    elements = gate.numel()
    padding = gate.new_zeros(2048 - elements % 1024)
    long = [torch.cat([t.reshape(-1), padding]) for t in (dh, gate, up)]
    expected = launch_backward(*long, "silu", True, None)
    for result, reference in zip(launch_backward(dh, gate, up, "silu", True, None), expected, strict=True):
        assert result.is_contiguous()
        assert torch.equal(result.reshape(-1), reference[:elements])
    assert torch.equal(launch_forward(gate, up, "silu").reshape(-1), expected[2][:elements])
    both = torch.empty(*gate.shape[:-1], 2 * gate.size(-1), dtype=gate.dtype, device=DEVICE)
    dup, dgate = both.chunk(2, -1)
    assert launch_backward(dh, gate, up, "silu", False, (dgate, dup)) == (dgate, dup, None)
    assert torch.equal(dgate.reshape(-1), expected[0][:elements])
    assert torch.equal(dup.reshape(-1), expected[1][:elements])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 0), (2, 511), (1, 512), (1024,), (7, 147), (3, 5, 1)], ids=str)
def test_every_size_is_covered_to_its_last_element_and_not_further(
    shape: tuple[int, ...], dtype: torch.dtype, red_zones: RedZones
) -> None:
    check_layout(*(red_zones.guard(draw(*shape, dtype=dtype, seed=seed)) for seed in range(3)))


@pytest.mark.parametrize("hidden", [1, 17, 64, 1500])
@pytest.mark.parametrize("gate_first", [True, False])
def test_halves_of_one_tensor_are_read_in_place(gate_first: bool, hidden: int, red_zones: RedZones) -> None:
    rows = 9 if hidden < 1000 else 2
    both = red_zones.guard(draw(2, rows, 2 * hidden, dtype=torch.bfloat16))
    gate, up = both.chunk(2, -1) if gate_first else both.chunk(2, -1)[::-1]
    check_layout(draw(2, rows, hidden, dtype=torch.bfloat16, seed=1), gate, up)


LAYOUTS = {
    "transposed": lambda t: t.transpose(0, 1),
    "channels last": lambda t: t.permute(2, 0, 1),
    "some rows of each block": lambda t: t[:, 1:3, 3:],
    "every second element": lambda t: t[..., ::2],
    "one column": lambda t: t[..., 5:6],
    "expanded over rows": lambda t: t[:, :1].expand(-1, 4, -1),
    "expanded over columns": lambda t: t[..., :1].expand(-1, -1, 7),
    "expanded from a scalar": lambda t: t[0, 0, 0].expand(3, 4, 5),
    "heads": lambda t: t.view(3, 5, 4, 10).transpose(1, 2),
    "four dimensions": lambda t: t.view(3, 5, 2, 2, 10)[::2, ::2, :, ::2, :9],
}


@pytest.mark.parametrize("which", ["dh", "gate", "up", "all"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read_right(layout: str, which: str, red_zones: RedZones) -> None:
    def make(name: str, seed: int) -> Tensor:
        t = LAYOUTS[layout](draw(3, 5, 40, seed=seed))
        return red_zones.guard(t if which in (name, "all") else t.contiguous())

    check_layout(make("dh", 0), make("gate", 1), make("up", 2))


def test_rows_of_unequal_spacing_cannot_be_written_to() -> None:
    t = draw(3, 4, 8)
    out = torch.empty(3, 8, 8, device=DEVICE)[:, ::3][:, :3, :], torch.empty(3, 4, 8, device=DEVICE)
    with pytest.raises(AssertionError):
        launch_backward(t[:, :3], t[:, :3], t[:, :3], "silu", False, (out[0], out[1][:, :3]))


def test_a_gradient_of_another_dtype_is_read_as_it_is() -> None:
    dh, gate, up = draw(700), *(draw(700, dtype=torch.bfloat16, seed=seed) for seed in (1, 2))
    truth = plain(dh.double(), gate.double(), up.double(), "silu")
    for ours, exact in zip(launch_backward(dh, gate, up, "silu", True, None), truth, strict=True):
        assert_as_accurate(ours, exact.to(torch.bfloat16), exact)


SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -1.0, 2.0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", ["silu", "relu", "gelu_erf", "gelu_tanh"])
def test_nan_and_infinity_give_what_pytorch_gives(kind: str) -> None:
    gate, up = (t.reshape(-1) for t in torch.meshgrid(*[torch.tensor(SPECIAL, device=DEVICE)] * 2, indexing="ij"))
    dh = torch.ones_like(gate)
    # One element at a time: PyTorch's vectorized code differs in the GELU of infinity.
    single = [plain(dh[i : i + 1], gate[i : i + 1], up[i : i + 1], kind) for i in range(gate.numel())]
    for ours, *stock in zip(launch_backward(dh, gate, up, kind, True, None), *single, strict=True):
        assert_same_special_values(ours, torch.cat(stock))


# Five rows: neither a row's number nor the spacing exceeds 32 bits, their product does.


def test_offsets_beyond_2_to_the_31_elements_are_right() -> None:
    dh, gate, up = (lazily_huge((5, 64), (2**29 + 16, 1), torch.bfloat16, DEVICE) for _ in range(3))
    for seed, t in enumerate((dh, gate, up)):
        t.copy_(draw(5, 64, dtype=torch.bfloat16, seed=seed))
    check_layout(dh, gate, up)


def test_gradients_are_written_beyond_2_to_the_31_elements() -> None:
    dh, gate, up = (draw(5, 64, dtype=torch.bfloat16, seed=seed) for seed in range(3))
    out = tuple(lazily_huge((5, 64), (2**29 + 16, 1), torch.bfloat16, DEVICE) for _ in range(2))
    expected = launch_backward(dh, gate, up, "silu", False, None)
    launch_backward(dh, gate, up, "silu", False, out)
    assert torch.equal(out[0], expected[0])
    assert torch.equal(out[1], expected[1])


class TestOperators:
    """The public functions on tensors that the kernels take."""

    @pytest.mark.parametrize("fused", [False, True])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_the_linear_behind_it_is_as_accurate_as_pytorchs(self, dtype: torch.dtype, fused: bool) -> None:
        both, weight, bias = (
            draw(40, 600, dtype=dtype),
            draw(20, 300, dtype=dtype, seed=1),
            draw(20, dtype=dtype, seed=2),
        )
        dy = draw(40, 20, dtype=dtype, seed=3)

        def stock(both: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            up, gate = both.chunk(2, -1)
            return F.linear(F.silu(gate) * up, weight, bias)

        def ours(both: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            if fused:
                return linear(gated_product_fused(both, "silu", False), weight, bias)
            up, gate = both.chunk(2, -1)
            return linear(gated_product(gate, up, "silu"), weight, bias)

        def run(compute: object, *tensors: Tensor) -> list[Tensor]:
            leaves = [t.detach().requires_grad_() for t in tensors]
            y = compute(*leaves)  # type: ignore[operator]
            return [y, *torch.autograd.grad(y, leaves, dy.to(y.dtype))]

        truth = run(stock, both.double(), weight.double(), bias.double())
        for candidate, reference, exact in zip(
            run(ours, both, weight, bias), run(stock, both, weight, bias), truth, strict=True
        ):
            assert_as_accurate(candidate.detach(), reference.detach(), exact.detach())

    def test_the_product_in_backward_is_the_one_of_the_forward(self) -> None:
        gate, up, weight = (draw(9, 50, dtype=torch.bfloat16, seed=seed).requires_grad_() for seed in range(3))
        y = linear(gated_product(gate, up, "gelu_tanh"), weight, None)
        dy = draw(9, 9, dtype=torch.bfloat16, seed=4)
        expected = dy.t() @ launch_forward(gate.detach(), up.detach(), "gelu_tanh")
        assert torch.equal(torch.autograd.grad(y, weight, dy)[0], expected)

    def test_a_second_backward_gives_the_same_and_writes_to_nothing(self, red_zones: RedZones) -> None:
        both = red_zones.guard(draw(4, 5, 60)).requires_grad_()
        dh = red_zones.guard(draw(4, 5, 30, seed=1))
        h = gated_product_fused(both, "silu", True)
        first, second = (torch.autograd.grad(h, both, dh, retain_graph=True)[0] for _ in range(2))
        assert torch.equal(first, second)
        assert first.data_ptr() != second.data_ptr()

    def test_the_first_of_blocks_that_are_alike_holds_one_gradient_less(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The product is recomputed and let go before its gradient is there, which takes another pass."""
        x, *weights = (draw(*shape, seed=seed).requires_grad_() for seed, shape in enumerate([(6, 8), *[(8, 8)] * 6]))

        def gradients() -> tuple[Tensor, ...]:
            h = x
            for gate, up, down in (weights[:3], weights[3:]):
                h = linear(gated_product(h @ gate, h @ up, "silu"), down, None)
            return torch.autograd.grad(h.square().sum(), [x, *weights])

        assert_the_first_of_two_takes_one_more(gradients, function_triton, 4, monkeypatch)

    def test_different_dtypes_of_gate_and_up_take_the_reference(self) -> None:
        gate, up = draw(4, 6).requires_grad_(), draw(4, 6, dtype=torch.bfloat16, seed=1).requires_grad_()
        h = gated_product(gate, up, "silu")
        stock = F.silu(gate) * up
        assert torch.equal(h, stock)
        for a, b in zip(*(torch.autograd.grad(t.sum(), (gate, up)) for t in (h, stock)), strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)

    def test_the_output_is_recomputed_by_the_kernel(self) -> None:
        gate, up = draw(6, 8).requires_grad_(), draw(6, 8, seed=1).requires_grad_()
        linear = torch.nn.Linear(8, 3, device=DEVICE)
        shapes: list[tuple[int, ...]] = []

        def pack(tensor: Tensor) -> Tensor:
            shapes.append(tuple(tensor.shape))
            return tensor.detach()

        pack.memopt_observer = True  # type: ignore[attr-defined]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), RecomputeScope():
            ours = linear(gated_product(gate, up, "silu"))
        assert shapes.count((6, 8)) == 2
        plain_graph = linear(gated_product(gate, up, "silu"))
        leaves = (gate, up, linear.weight)
        expected = torch.autograd.grad(plain_graph.square().sum(), leaves)
        for a, b in zip(torch.autograd.grad(ours.square().sum(), leaves), expected, strict=True):
            assert torch.equal(a, b)


def test_gradients_may_be_written_over_what_they_are_computed_from() -> None:
    dh, gate, up = (draw(3, 37, dtype=torch.bfloat16, seed=seed) for seed in range(3))
    expected = launch_backward(dh, gate, up, "silu", True, None)
    for result, reference in zip(launch_backward(dh, gate, up, "silu", True, (gate, up), True), expected, strict=True):
        assert torch.equal(result, reference)
        assert any(result is given for given in (dh, gate, up))
