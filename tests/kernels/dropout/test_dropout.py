"""Dropout by a seed: the mask is what it should be, in both directions, and no tensor is kept for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from memopt.kernels.base.counter import uniform
from memopt.kernels.dropout import function as dropout
from memopt.kernels.dropout.function import seeded_dropout
from memopt.recompute.expression import after
from memopt.recompute.graph import dropped_out, expression_of, may_be_repeated
from memopt.recompute.versions import with_witness
from tests.support.compare import same_bits

COUNT = 2**16
#: Of a binomial share, in standard errors: seen once in two million.
SIGMAS = 5
PROBABILITIES = [0.0, 1e-3, 0.05, 0.1, 1 / 3, 0.5, 0.9, 0.999, 1.0]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2),
    "heads": lambda x: x.transpose(1, 2),
    "slice": lambda x: x[:, ::2, 1:],
    "expanded rows": lambda x: x[:, :1].expand(-1, 6, -1),
    "expanded columns": lambda x: x[..., :1].expand(-1, -1, 4),
    "not aligned": lambda x: x.flatten()[1:],
    "scalar": lambda x: x[0, 0, 0],
    "one element": lambda x: x[:1, :1, :1],
    "empty": lambda x: x[:0],
}
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("p", PROBABILITIES)
def test_the_share_of_dropped_elements_is_p(p: float) -> None:
    dropped = float((seeded_dropout(torch.ones(COUNT), p, 5) == 0).double().mean())
    assert abs(dropped - p) <= SIGMAS * math.sqrt(p * (1 - p) / COUNT)


@pytest.mark.parametrize("p", PROBABILITIES)
def test_an_element_is_dropped_where_its_random_number_is_below_p(p: float) -> None:
    kept = uniform(torch.arange(COUNT), 7).double() >= p
    assert torch.equal(seeded_dropout(torch.ones(COUNT), p, 7) != 0, kept)


def test_an_element_whose_random_number_is_p_is_kept() -> None:
    u = uniform(torch.arange(100), 7)
    for place in range(100):
        y = seeded_dropout(torch.ones(100), float(u[place]), 7)
        assert y[place] != 0


@pytest.mark.parametrize("p", [0.05, 0.1, 1 / 3, 0.7, 1e-9, 2**-24, 1 - 2**-24])
def test_the_threshold_is_that_of_p_to_the_last_random_number(p: float) -> None:
    threshold = dropout.Mask(0, p, 1.0).threshold
    assert threshold == torch.tensor(threshold, dtype=torch.float32).item()
    below = threshold - 2**-24
    assert below < p <= threshold  # the random numbers between are none


def test_masks_of_two_seeds_are_independent() -> None:
    one, other = (seeded_dropout(torch.ones(COUNT), 0.25, seed) != 0 for seed in (1, 2))
    agree = float((one == other).double().mean())
    expected = 0.25**2 + 0.75**2
    assert abs(agree - expected) < SIGMAS * math.sqrt(expected * (1 - expected) / COUNT)


def test_the_mean_over_seeds_is_the_input() -> None:
    x, p, draws = draw(64, dtype=torch.float64), 0.3, 2000
    mean = torch.stack([seeded_dropout(x, p, seed) for seed in range(draws)]).mean(0)
    error = ((mean - x) / x).abs().max()
    assert error < SIGMAS * math.sqrt(p / (1 - p) / draws)


@every_dtype
@every_layout
@pytest.mark.parametrize("p", [0.05, 0.1, 1 / 3, 0.9, 0.99999])
def test_values_and_strides_are_those_of_torchs_dropout_with_that_mask(
    p: float, layout: Callable[[Tensor], Tensor], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = draw(6, 7, 8, dtype=dtype)
    x[0, 0], x[1, 1], x[2, 2], x[3, 3] = math.inf, -math.inf, math.nan, -0.0
    x = layout(x).detach().requires_grad_()
    torch.manual_seed(3)
    expected = F.dropout(x, p, True)
    torch.manual_seed(3)
    kept = F.dropout(torch.ones_like(x), p, True).detach().flatten() != 0
    monkeypatch.setattr(dropout, "uniform", lambda index, seed: kept[index].float())
    y = seeded_dropout(x, p, 0)
    assert same_bits(y, expected)
    assert y.stride() == expected.stride()
    dy = draw(*x.shape, dtype=dtype)
    gradients = [torch.autograd.grad(out, x, dy)[0] for out in (y, expected)]
    assert same_bits(*gradients)


@pytest.mark.parametrize("p", [0.0, 1.0])
@every_dtype
def test_nothing_and_everything_dropped(dtype: torch.dtype, p: float) -> None:
    x = draw(100, dtype=dtype)
    x[:3] = torch.tensor([math.inf, math.nan, -math.inf])
    x.requires_grad_()
    ours, theirs = seeded_dropout(x, p, 1), F.dropout(x, p, True)
    assert same_bits(ours, theirs)
    assert same_bits(*(torch.autograd.grad(y, x, draw(100, dtype=dtype))[0] for y in (ours, theirs)))


@every_layout
def test_the_mask_goes_by_the_logical_index(layout: Callable[[Tensor], Tensor]) -> None:
    x = layout(draw(6, 7, 8))
    y = seeded_dropout(x, 0.4, 11)
    kept = (uniform(torch.arange(x.numel()), 11).double() >= 0.4).view(x.shape)
    assert torch.equal(y != 0, kept)
    assert torch.equal(y, seeded_dropout(x.contiguous(), 0.4, 11))


@pytest.mark.parametrize("chunk", [1, 64, 100, 999, 1000, 1001])
def test_a_mask_that_is_drawn_in_parts_is_the_same(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = draw(1000)
    whole = seeded_dropout(x, 0.4, 2)
    monkeypatch.setattr(dropout, "_CHUNK", chunk)
    assert torch.equal(seeded_dropout(x, 0.4, 2), whole)


def naive(x: Tensor, p: float, seed: int) -> Tensor:
    kept = (uniform(torch.arange(x.numel()), seed).double() >= p).view(x.shape)
    return x * kept.to(x.dtype).div(1 - p)


@every_dtype
def test_the_gradient_is_that_of_the_formula_to_the_last_bit(dtype: torch.dtype) -> None:
    x, w = draw(5, 33, dtype=dtype).requires_grad_(), draw(33, 4, dtype=dtype)
    ours, theirs = (torch.autograd.grad((f(x, 0.1, 9) @ w).square().sum(), x)[0] for f in (seeded_dropout, naive))
    assert same_bits(ours, theirs)
    assert ours.abs().sum() > 0


def test_no_tensor_is_saved() -> None:
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    x = draw(64).requires_grad_()
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = seeded_dropout(x, 0.5, 0)
    assert not saved
    assert not any(isinstance(value, Tensor) for value in vars(y.grad_fn).values())
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        F.dropout(x, 0.5)
    assert saved, "the check sees what stock dropout saves"


def test_backward_runs_again_on_a_retained_graph() -> None:
    x = draw(64).requires_grad_()
    y = seeded_dropout(x, 0.5, 4)
    first, second = (torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(first != 0, y != 0)


def test_it_can_be_differentiated_twice() -> None:
    x = draw(3, 5, dtype=torch.float64).requires_grad_()

    def run(x: Tensor) -> Tensor:
        return seeded_dropout(x.sin(), 0.4, 1).pow(3)

    assert torch.autograd.gradcheck(run, (x,))
    assert torch.autograd.gradgradcheck(run, (x,))


def test_a_batch_of_gradients_gets_one_mask() -> None:
    x = draw(3, 5).requires_grad_()
    y, dy = seeded_dropout(x, 0.4, 1), draw(7, 3, 5)
    (dx,) = torch.autograd.grad(y, x, dy, is_grads_batched=True, retain_graph=True)
    for one, expected in zip(dy, dx, strict=True):
        assert torch.equal(torch.autograd.grad(y, x, one, retain_graph=True)[0], expected)


@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan])
def test_a_probability_outside_of_zero_to_one_is_refused(p: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        seeded_dropout(draw(3), p, 0)


def test_integers_are_refused() -> None:
    with pytest.raises(ValueError, match="floating"):
        seeded_dropout(torch.arange(3), 0.5, 0)


def test_a_tensor_without_memory_costs_no_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout, "uniform", lambda *_: pytest.fail("drawn"))
    dropout._scale.cache_clear()
    with FakeTensorMode():
        x = torch.empty(2**20, 2**12, dtype=torch.bfloat16, requires_grad=True)
        y = seeded_dropout(x.transpose(0, 1), 0.1, 3)
        (dx,) = torch.autograd.grad(y, x, torch.empty_like(y))
    assert (y.shape, y.dtype) == ((2**12, 2**20), torch.bfloat16)
    assert dx.shape == x.shape


def test_the_scale_is_rounded_as_on_the_device() -> None:
    exact = 1 / (1 - 0.1)
    in_fp32 = torch.tensor(exact, dtype=torch.float32).item()
    assert dropout._scale(0.1, torch.bfloat16, "cpu") == torch.tensor(exact).bfloat16().item()
    assert dropout._scale(0.1, torch.bfloat16, "cuda") == in_fp32
    assert dropout._scale(0.1, torch.float32, "cuda") == in_fp32
    assert dropout._scale(0.1, torch.float64, "cuda") == exact


# --- recomputed -------------------------------------------------------------------------------------------------


def test_what_was_done_to_an_output_can_be_done_again() -> None:
    z = draw(6, 40).requires_grad_()
    h = F.silu(z)
    y = seeded_dropout(seeded_dropout(h.bfloat16(), 0.1, 3).double(), 0.5, 4)
    found = expression_of(y.grad_fn)
    assert found.node is h.grad_fn
    assert [function for function, _, _ in found.steps] == [Tensor.to, dropped_out, Tensor.to, dropped_out]
    assert torch.equal(after(h.detach(), found.steps), y)
    assert torch.equal(found.value(), y)
    assert len({found.steps, expression_of(y.grad_fn).steps}) == 1, "equal, so it is computed once for all holders"


@pytest.mark.parametrize("device_scale", [0.1, 0.3])
def test_it_is_recomputed_on_another_device_as_the_forward_rounded_it(device_scale: float) -> None:
    x = draw(1000, dtype=torch.bfloat16)
    on_gpu = dropout.Mask(1, device_scale, dropout._scale(device_scale, torch.bfloat16, "cuda"))
    on_cpu = dropout.Mask(1, device_scale, dropout._scale(device_scale, torch.bfloat16, "cpu"))
    kept = seeded_dropout(x, device_scale, 1) != 0
    assert torch.equal(on_cpu.on(x), seeded_dropout(x, device_scale, 1))
    assert torch.equal(on_gpu.on(x), torch.where(kept, x.float() * on_gpu.scale, x.float() * 0).bfloat16())
    assert not torch.equal(on_cpu.on(x), on_gpu.on(x))


@pytest.mark.parametrize("change", [lambda x: x.mul_(2), lambda x: x[0].zero_(), lambda x: x.detach().add_(1)])
def test_a_dropout_of_what_was_changed_in_place_has_no_source(change: Callable[[Tensor], Any]) -> None:
    h = F.silu(draw(6, 40).requires_grad_())
    with torch.no_grad():
        change(h)
    y = seeded_dropout(h, 0.1, 3)
    found = expression_of(y.grad_fn)
    assert found.node is y.grad_fn
    assert not found.steps


def test_what_was_read_through_a_changed_view_has_no_source() -> None:
    h = F.silu(draw(6, 40).requires_grad_())
    view = h.view(40, 6)
    with torch.no_grad():
        h.mul_(2)
    y = seeded_dropout(view, 0.1, 3)
    assert expression_of(y.grad_fn).node is y.grad_fn


@pytest.mark.parametrize(
    ("make", "follows"),
    [
        (lambda h: h.double(), True),
        (lambda h: seeded_dropout(h, 0.1, 3).double(), True),
        (lambda h: seeded_dropout(h.transpose(0, 1).contiguous(), 0.1, 3), True),
        (lambda h: seeded_dropout(h.transpose(0, 1).contiguous().transpose(0, 1).contiguous(), 0.1, 3), False),
        (lambda h: seeded_dropout(h, 0.1, 3).clone(), False),
        (lambda h: seeded_dropout(seeded_dropout(h.double(), 0.1, 3).clone(), 0.1, 4), False),
    ],
)
def test_one_copy_is_followed_before_the_first_dropout_and_none_after_it(
    make: Callable[[Tensor], Tensor], follows: bool
) -> None:
    made = make(with_witness(F.silu(draw(6, 40).requires_grad_())))  # before PyTorch 2.13 a node lives as its output
    found = expression_of(made.grad_fn)
    assert found.rule is not None
    assert may_be_repeated(found, found.rule) is follows
