"""The activation kernels against the formulas in fp64, on every layout that a launcher takes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from memopt.kernels.activation import function_triton
from memopt.kernels.activation.function import Dtypes, recomputed_activation
from memopt.kernels.activation.function_triton import launch_backward, launch_forward
from memopt.kernels.linear.function import linear
from memopt.saved import RecomputeScope
from memopt.torch_compat.activations import ACTIVATIONS
from tests.triton.accuracy import assert_as_accurate, assert_same_special_values
from tests.triton.conftest import DEVICE
from tests.triton.memory import RedZones, lazily_huge
from tests.triton.passes import assert_the_first_of_two_takes_one_more

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = sorted(ACTIVATIONS)
SMOOTH = "silu"


def draw(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(DEVICE, dtype)


def check(z: Tensor, dh: Tensor, kind: str) -> None:
    h, dz = launch_forward(z, kind), launch_backward(dh, z, kind)[0]
    assert_as_accurate(h, ACTIVATIONS[kind].value(z), ACTIVATIONS[kind].value(z.double()))
    reference = ACTIVATIONS[kind].gradient(dh.to(z.dtype), z)
    assert_as_accurate(dz, reference, ACTIVATIONS[kind].gradient(dh.double(), z.double()))


def check_layout(z: Tensor, dh: Tensor) -> None:
    """What a launcher gives must not depend on where the elements lie: the reference is one long contiguous launch,
    whose accuracy the first test holds against PyTorch's."""
    padding = z.new_zeros(2048 - z.numel() % 1024)
    long_z, long_dh = (torch.cat([t.reshape(-1), padding]) for t in (z, dh))
    h = launch_forward(z, SMOOTH)
    dz, recomputed = launch_backward(dh, z, SMOOTH, recompute=True)
    assert recomputed is not None
    assert torch.equal(recomputed, h)
    assert torch.equal(h.reshape(-1), launch_forward(long_z, SMOOTH)[: z.numel()])
    assert torch.equal(dz.reshape(-1), launch_backward(long_dh, long_z, SMOOTH)[0][: z.numel()])


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("scale", [1e-3, 3.0, 30.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_value_and_gradient_are_as_accurate_as_pytorchs(kind: str, dtype: torch.dtype, scale: float) -> None:
    check(draw(2003, dtype=dtype, scale=scale), draw(2003, dtype=dtype, seed=1), kind)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("elements", [0, 1, 15, 511, 512, 1024, 1025])
def test_every_size_is_covered_to_its_last_element_and_not_further(
    elements: int, dtype: torch.dtype, red_zones: RedZones
) -> None:
    z = red_zones.guard(draw(elements, dtype=dtype))
    check_layout(z, red_zones.guard(draw(elements, dtype=dtype, seed=1)))


LAYOUTS = {
    "contiguous": lambda z: z,
    "transposed": lambda z: z.transpose(0, 1),
    "channels last": lambda z: z.permute(2, 0, 1),
    "half of each row": lambda z: z[..., : z.size(-1) // 2],
    "some rows of each block": lambda z: z[:, 1:3, 3:],
    "every second element": lambda z: z[..., ::2],
    "one column": lambda z: z[..., 5:6],
    "expanded over rows": lambda z: z[:, :1].expand(-1, 4, -1),
    "expanded over columns": lambda z: z[..., :1].expand(-1, -1, 7),
    "expanded from a scalar": lambda z: z[0, 0, 0].expand(3, 4, 5),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read_right_and_keeps_its_dense_strides(
    layout: str, dtype: torch.dtype, red_zones: RedZones
) -> None:
    z = red_zones.guard(LAYOUTS[layout](draw(3, 5, 40, dtype=dtype)))
    h = launch_forward(z, SMOOTH)
    dh = draw(*z.shape, dtype=dtype, seed=1)
    assert h.stride() == ACTIVATIONS[SMOOTH].value(z).stride()
    assert h._version == 0  # its readers would save it instead of z
    assert launch_backward(dh, z, SMOOTH)[0].stride() == h.stride()
    check_layout(z, dh)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_every_layout_are_read_right(layout: str, red_zones: RedZones) -> None:
    dh = red_zones.guard(LAYOUTS[layout](draw(3, 5, 40, seed=1)))
    check_layout(draw(*dh.shape), dh)


def test_four_leading_dimensions_that_do_not_merge_are_copied() -> None:
    z = draw(3, 4, 5, 6, 7)[::2, ::2, ::2, ::2, :5]
    check_layout(z, draw(*z.shape, seed=1))


def test_a_gradient_of_another_dtype_is_read_as_it_is() -> None:
    z, dh = draw(700, dtype=torch.bfloat16), draw(700, seed=1)
    dz, _ = launch_backward(dh, z, SMOOTH)
    truth = ACTIVATIONS[SMOOTH].gradient(dh.double(), z.double())
    assert dz.dtype == torch.bfloat16
    assert_as_accurate(dz, truth.to(torch.bfloat16), truth)


SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0, 3.0, -3.0, 6.0, 1e4, -1e4)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_infinity_give_what_pytorch_gives(kind: str, dtype: torch.dtype) -> None:
    # PyTorch's vectorized and scalar code, which the size chooses, disagree in a few of these; either is right.
    z = torch.tensor(SPECIAL, dtype=dtype, device=DEVICE)
    dh = torch.ones_like(z)
    values, gradients = [], []
    for device in {DEVICE, "cpu"}:
        for repeats in (1, 64):
            many = [z.to(device)[i : i + 1].repeat(repeats) for i in range(z.numel())]
            values.append(torch.cat([ACTIVATIONS[kind].value(t)[:1] for t in many]).to(DEVICE))
            gradients.append(
                torch.cat([ACTIVATIONS[kind].gradient(torch.ones_like(t), t)[:1] for t in many]).to(DEVICE)
            )
    assert_same_special_values(launch_forward(z, kind), *values)
    assert_same_special_values(launch_backward(dh, z, kind)[0], *gradients)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_is_not_finite_stays_so_except_where_the_function_is_flat(kind: str) -> None:
    z = torch.tensor([-7.0, -1.0, 1.0, 7.0], device=DEVICE)
    for value in (math.nan, math.inf):
        dh = torch.full_like(z, value)
        assert torch.equal(launch_backward(dh, z, kind)[0].isfinite(), ACTIVATIONS[kind].gradient(dh, z).isfinite())


def test_offsets_beyond_2_to_the_31_elements_are_right() -> None:
    # Neither a row's number nor the spacing exceeds 32 bits, their product does.
    z = lazily_huge((5, 64), (2**29 + 16, 1), torch.bfloat16, DEVICE)
    z.copy_(draw(5, 64, dtype=torch.bfloat16))
    check_layout(z, z)


def test_the_operator_runs_the_kernels_and_keeps_its_input_only() -> None:
    z = draw(6, 50).requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        h = recomputed_activation(z, ACTIVATIONS["gelu_tanh"].value, "gelu_tanh")
    assert [t.data_ptr() for t in kept] == [z.data_ptr()]
    dh = draw(6, 50, seed=1)
    first, second = (torch.autograd.grad(h, z, dh, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(h, launch_forward(z.detach(), "gelu_tanh"))
    assert torch.equal(first, launch_backward(dh, z.detach(), "gelu_tanh")[0])
    assert torch.equal(first, second)
    assert torch.equal(dh, draw(6, 50, seed=1))


def test_a_function_that_returns_fp32_runs_as_one_kernel_and_its_output_is_rounded_to_fp32() -> None:
    """As `gelu_new` does under autocast, whose power is computed in fp32."""
    z = draw(2003, dtype=torch.bfloat16, scale=3.0).requires_grad_()

    def in_fp32(t: Tensor) -> Tensor:
        return ACTIVATIONS["gelu_tanh"].value(t.float())

    h = recomputed_activation(z, in_fp32, "gelu_tanh")
    assert h.dtype == torch.float32
    assert type(h.grad_fn).__name__ == "KernelActivationFunctionBackward"
    assert_as_accurate(h.detach(), in_fp32(z).detach(), ACTIVATIONS["gelu_tanh"].value(z.detach().double()))
    dh = draw(2003, seed=1)
    ours, stock = (torch.autograd.grad(y, z, dh)[0] for y in (h, in_fp32(z)))
    assert_as_accurate(ours, stock, ACTIVATIONS["gelu_tanh"].gradient(dh.double(), z.detach().double()))


def test_a_linear_behind_it_recomputes_the_output_in_fp32() -> None:
    z, weight = draw(6, 40, dtype=torch.bfloat16).requires_grad_(), draw(5, 40, seed=1).requires_grad_()

    def in_fp32(t: Tensor) -> Tensor:
        return ACTIVATIONS["gelu_tanh"].value(t.float())

    h = recomputed_activation(z, in_fp32, "gelu_tanh")
    dy = draw(6, 5, seed=2)
    dz, dweight = torch.autograd.grad(linear(h, weight, None), (z, weight), dy, retain_graph=True)
    assert torch.equal(dweight, dy.t().mm(h.detach()))
    stock_dz, _ = torch.autograd.grad(torch.nn.functional.linear(h, weight), (z, weight), dy)
    assert torch.equal(dz, stock_dz)


def test_a_function_that_returns_a_narrower_dtype_is_replayed() -> None:
    z = draw(64).requires_grad_()

    def in_bf16(t: Tensor) -> Tensor:
        return ACTIVATIONS["gelu_tanh"].value(t.bfloat16())

    with torch.autocast(z.device.type, torch.bfloat16):  # without autocast, a known function keeps fp32
        h = recomputed_activation(z, in_bf16, "gelu_tanh")
    assert torch.equal(h, in_bf16(z))


def test_the_dtype_that_a_function_returns_is_found_out_once_for_each_dtype() -> None:
    found: Dtypes = {}
    asked: list[torch.dtype] = []

    def tanh(t: Tensor) -> Tensor:
        asked.append(t.dtype)
        return torch.tanh(t)

    for dtype in (torch.bfloat16, torch.float32, torch.float16) * 2:
        recomputed_activation(draw(64, dtype=dtype).requires_grad_(), tanh, "tanh", found)
    assert asked == [torch.bfloat16, torch.float16], "fp32 without autocast stays fp32"
    with torch.autocast(DEVICE, torch.bfloat16):
        recomputed_activation(draw(64, dtype=torch.bfloat16).requires_grad_(), tanh, "tanh", found)
    assert len(asked) == 3


def test_the_output_is_recomputed_by_the_kernel() -> None:
    torch.manual_seed(0)
    z = draw(4, 8).requires_grad_()
    linear = torch.nn.Linear(8, 8, device=DEVICE)
    kept: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor.detach()

    pack.memopt_observer = True  # type: ignore[attr-defined]
    gradients = []
    for scoped in (False, True):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            if scoped:
                with RecomputeScope():
                    y = linear(recomputed_activation(z, ACTIVATIONS["quick_gelu"].value, "quick_gelu"))
            else:
                y = linear(recomputed_activation(z, ACTIVATIONS["quick_gelu"].value, "quick_gelu"))
        gradients.append((kept.count((4, 8)), *torch.autograd.grad(y.square().sum(), (z, linear.weight))))
    (stock_kept, *stock), (ours_kept, *ours) = gradients
    assert ours_kept == stock_kept - 1
    assert all(torch.equal(a, b) for a, b in zip(stock, ours, strict=True))


def test_a_double_backward_is_an_error() -> None:
    z = draw(8).requires_grad_()
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(recomputed_activation(z, torch.tanh, "tanh").sum(), z, create_graph=True)


def test_the_gradient_may_be_written_over_what_it_is_computed_from() -> None:
    z, dh = torch.randn(3, 37, device=DEVICE).bfloat16(), torch.randn(3, 37, device=DEVICE).bfloat16()
    expected = launch_backward(dh, z, SMOOTH, recompute=True)
    dz, h = launch_backward(dh, z, SMOOTH, True, True, z)
    assert dz is z
    assert torch.equal(dz, expected[0])
    assert torch.equal(h, expected[1])


def test_the_first_of_layers_that_are_alike_lets_its_output_go_before_the_gradient_is_there(monkeypatch) -> None:
    x, *weights = (torch.randn(8, 8, device=DEVICE, requires_grad=True) for _ in range(5))

    def gradients() -> tuple[Tensor, ...]:
        h = x
        for weight, behind in (weights[:2], weights[2:]):
            h = linear(recomputed_activation(h @ weight, torch.tanh, "tanh"), behind, None)
        return torch.autograd.grad(h.square().sum(), [x, *weights])

    assert_the_first_of_two_takes_one_more(gradients, function_triton, 3, monkeypatch)
