"""MS-norms against autograd through the formula, in fp64 and in the dtypes of training."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from memopt.kernels.norm.function import NormSpec, affine, ms_norm, normalize

FAMILIES = [
    # kind, offset, has weight, has bias: the eight numeric families of transformers' norms
    ("rms", 0, True, False),
    ("layer", 0, True, True),
    ("rms", 1, True, False),
    ("rms", 0, False, False),
    ("layer", 0, True, False),
    ("layer", 1, True, True),
    ("layer", 1, True, False),
    ("layer", 0, False, False),
]


def make(family, shape, dtype, cast="after"):
    kind, offset, has_weight, has_bias = family
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    x = (draw(*shape) * 2 + 0.5).requires_grad_()
    weight = draw(shape[-1]).requires_grad_() if has_weight else None
    bias = draw(shape[-1]).requires_grad_() if has_bias else None
    return x, weight, bias, NormSpec(kind, 1e-5, offset, cast)


def plain(x: Tensor, weight: Tensor | None, bias: Tensor | None, spec: NormSpec) -> Tensor:
    """The formula, differentiated by autograd."""
    return affine(normalize(x, spec)[0], weight, bias, spec, x.dtype, x.dtype)


def leaves(*tensors: Tensor | None) -> list[Tensor]:
    return [t for t in tensors if t is not None]


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_gradients_are_right_in_fp64(family):
    x, weight, bias, spec = make(family, (3, 2, 7), torch.float64)
    inputs = leaves(x, weight, bias)
    assert gradcheck(lambda *_: ms_norm(x, weight, bias, spec, x.dtype), inputs)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_the_families_mean_what_torch_computes(family):
    x, weight, bias, spec = make(family, (5, 16), torch.float64)
    kind, offset = spec.kind, spec.offset
    scale = None if weight is None else weight + offset
    if kind == "layer":
        expected = torch.nn.functional.layer_norm(x, (16,), scale, bias, spec.eps)
    else:
        expected = torch.nn.functional.rms_norm(x, (16,), scale, spec.eps)
    torch.testing.assert_close(ms_norm(x, weight, bias, spec, x.dtype), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_16_bit_norms_are_rounded_once_from_what_torch_computes_in_fp64(family, dtype):
    x, weight, bias, spec = make(family, (64, 48), dtype)
    scale = None if weight is None else weight.double() + spec.offset
    if spec.kind == "layer":
        shift = None if bias is None else bias.double()
        exact = torch.nn.functional.layer_norm(x.double(), (48,), scale, shift, spec.eps)
    else:
        exact = torch.nn.functional.rms_norm(x.double(), (48,), scale, spec.eps)
    # One rounding of y, and those of sums of 48 numbers of size 1 in fp32, which are far smaller.
    bound = torch.finfo(dtype).eps / 2 * exact.abs() + 48 * torch.finfo(torch.float32).eps * exact.abs().max()
    assert ((ms_norm(x, weight, bias, spec, dtype).double() - exact).abs() <= bound).all()


@pytest.mark.parametrize(
    ("family", "cast", "dtype"),
    list(itertools.product(FAMILIES[:3], ["before", "after"], [torch.float32, torch.bfloat16, torch.float16])),
    ids=str,
)
def test_errors_against_fp64_do_not_exceed_those_of_autograd(family, cast, dtype):
    shape = (256, 96)
    x, weight, bias, spec = make(family, shape, dtype, cast)
    dy = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)

    def run(function, *tensors):
        y = function(*tensors)
        return [y, *torch.autograd.grad(y, leaves(*tensors), dy.to(y.dtype))]

    def double(t):
        return None if t is None else t.detach().double().requires_grad_()

    truth = run(lambda *t: plain(*t, spec), *map(double, (x, weight, bias)))
    stock = run(lambda *t: plain(*t, spec), x, weight, bias)
    ours = run(lambda *t: ms_norm(*t, spec, dtype), x, weight, bias)
    for exact, reference, candidate in zip(truth, stock, ours, strict=True):
        error = (candidate.double() - exact).square().mean().sqrt()
        # x_hat is rounded once before it is read in backward: one rounding, of the size of the dtype's own,
        # beside those that the reference makes.
        rounding = torch.finfo(dtype).eps / 2 * exact.square().mean().sqrt()
        assert error <= 1.25 * (reference.double() - exact).square().mean().sqrt() + rounding


def test_the_forward_is_bitwise_that_of_the_formula():
    x, weight, bias, spec = make(FAMILIES[1], (64, 48), torch.bfloat16)
    assert torch.equal(ms_norm(x, weight, bias, spec, x.dtype), plain(x, weight, bias, spec))


def test_only_what_needs_a_gradient_gets_one():
    x, weight, bias, spec = make(FAMILIES[1], (4, 8), torch.float32)
    weight.requires_grad_(False)
    y = ms_norm(x, weight, bias, spec, x.dtype)
    y.sum().backward()
    assert weight.grad is None
    assert x.grad is not None
    assert bias.grad is not None


def test_a_norm_without_affine_keeps_its_output_and_one_number_a_row():
    x, _, _, spec = make(FAMILIES[3], (4, 8), torch.bfloat16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.detach()) or t.detach(), lambda t: t):
        y = ms_norm(x, None, None, spec, x.dtype)
    assert [tuple(t.shape) for t in kept] == [(4, 8), (4, 1)]
    assert kept[0].untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
    assert kept[1].dtype == torch.float32


@pytest.mark.parametrize("shape", [(0, 8), (3, 1), (1, 1, 5), (7,), (2, 3, 129)], ids=str)
def test_odd_and_empty_shapes(shape):
    x, weight, bias, spec = make(FAMILIES[1], shape, torch.float32)
    y = ms_norm(x, weight, bias, spec, x.dtype)
    y.sum().backward()
    assert y.shape == x.shape
    assert x.grad.shape == x.shape
    assert weight.grad.shape == weight.shape


def test_strided_inputs_and_expanded_gradients():
    x, weight, bias, spec = make(FAMILIES[1], (6, 10), torch.float64)
    strided = x.detach().t().contiguous().t().requires_grad_()
    a = ms_norm(x, weight, bias, spec, x.dtype)
    b = ms_norm(strided, weight, bias, spec, x.dtype)
    assert torch.equal(a, b)
    dy = torch.ones(1, 10, dtype=torch.float64).expand(6, 10)
    assert torch.equal(torch.autograd.grad(a, x, dy)[0], torch.autograd.grad(b, strided, dy)[0])


def test_nan_and_inf_stay_visible_in_both_directions():
    x, weight, bias, spec = make(FAMILIES[0], (3, 8), torch.float32)
    with torch.no_grad():
        x[0, 0], x[1, 0] = float("nan"), float("inf")
    y = ms_norm(x, weight, bias, spec, x.dtype)
    y.sum().backward()
    assert y[0].isnan().all()
    assert x.grad[0].isnan().all()
    assert not x.grad[1].isfinite().all()
    assert x.grad[2].isfinite().all()


def test_a_zero_weight_still_gets_a_gradient():
    x, weight, bias, spec = make(FAMILIES[0], (32, 8), torch.bfloat16)
    with torch.no_grad():
        weight.zero_()
    ms_norm(x, weight, bias, spec, x.dtype).sum().backward()
    assert (weight.grad != 0).all()


def test_incoming_gradients_are_not_written_to():
    x, weight, bias, spec = make(FAMILIES[1], (4, 8), torch.float32)
    dy = torch.randn(4, 8)
    copy = dy.clone()
    ms_norm(x, weight, bias, spec, x.dtype).backward(dy)
    assert torch.equal(dy, copy)


def test_a_double_backward_is_an_error_and_not_a_wrong_number():
    x, weight, bias, spec = make(FAMILIES[1], (4, 8), torch.float32)
    for affine_parameters in ((weight, bias), (None, None)):
        y = ms_norm(x, *affine_parameters, spec, x.dtype)
        with pytest.raises(RuntimeError, match="create_graph"):
            torch.autograd.grad(y.sum(), x, create_graph=True)


def terms(family, shape, dtype):
    """Two terms of a sum, and the parameters of a norm."""
    a, weight, bias, spec = make(family, shape, dtype)
    b = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    return a, b, weight, bias, spec


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_gradients_of_the_norm_of_a_sum_are_right_in_fp64(family):
    a, b, weight, bias, spec = terms(family, (3, 2, 7), torch.float64)
    assert gradcheck(lambda *_: ms_norm(a, weight, bias, spec, a.dtype, residual=b), leaves(a, b, weight, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_the_norm_of_a_sum_is_bitwise_that_of_the_sum_in_both_directions(family, dtype):
    a, b, weight, bias, spec = terms(family, (16, 24), dtype)
    inputs, dy = leaves(a, b, weight, bias), torch.randn(16, 24).to(dtype)
    results = []
    for y in (ms_norm(a, weight, bias, spec, dtype, residual=b), ms_norm(a + b, weight, bias, spec, dtype)):
        results.append([y, *torch.autograd.grad(y, inputs, dy)])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.parametrize("family", [FAMILIES[1], FAMILIES[3]], ids=str)
def test_only_the_term_that_needs_a_gradient_gets_one(family, frozen):
    a, b, weight, bias, spec = terms(family, (4, 8), torch.float32)
    pair = [a, b]
    pair[frozen].requires_grad_(False)
    y = ms_norm(pair[0], weight, bias, spec, a.dtype, residual=pair[1])
    (y * torch.randn(4, 8)).sum().backward()
    assert pair[frozen].grad is None
    assert pair[1 - frozen].grad.any()


def test_the_norm_of_a_tensor_and_itself_gets_the_gradient_twice():
    a, _, weight, bias, spec = terms(FAMILIES[1], (4, 8), torch.float64)
    assert gradcheck(lambda *_: ms_norm(a, weight, bias, spec, a.dtype, residual=a), leaves(a, weight, bias))


def test_gradients_of_both_terms_can_be_changed_without_changing_each_other():
    a, b, weight, bias, spec = terms(FAMILIES[1], (4, 8), torch.float32)
    (ms_norm(a, weight, bias, spec, a.dtype, residual=b) * torch.randn(4, 8)).sum().backward()
    before = b.grad.clone()
    a.grad.zero_()
    assert torch.equal(b.grad, before)


@pytest.mark.parametrize("other", [torch.zeros(1, 8), torch.zeros(4, 8, dtype=torch.float64)], ids=["shape", "dtype"])
def test_terms_of_another_shape_or_dtype_are_refused(other):
    a, _, weight, bias, spec = terms(FAMILIES[1], (4, 8), torch.float32)
    with pytest.raises(ValueError, match="one shape and dtype"):
        ms_norm(a, weight, bias, spec, a.dtype, residual=other)


@pytest.mark.parametrize("seed", range(60))
def test_the_norm_of_any_sum_has_the_gradients_of_the_norm_of_the_sum_that_was_made(seed):
    pick, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    shape = (pick.choice([1, 2, 5]), pick.choice([1, 3]), pick.choice([3, 8, 33]))
    spec = NormSpec(kind=pick.choice(["rms", "layer"]), eps=pick.choice([1e-12, 1e-5, 0.1]), offset=0, cast="after")

    def drawn(*size):
        return torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_(pick.random() < 0.7)

    a, b = (drawn(*shape) if pick.random() < 0.6 else drawn(shape[-1]).expand(shape) for _ in range(2))
    weight, bias = drawn(shape[-1]), drawn(shape[-1]) if spec.kind == "layer" else None
    trained = [each for each in (a, b, weight, bias) if each is not None and each.requires_grad]
    if not trained:
        trained = [a.requires_grad_()]
    dtype = torch.float64
    y, made = ms_norm(a, weight, bias, spec, dtype, dtype, residual=b), ms_norm(a + b, weight, bias, spec, dtype, dtype)
    truth = torch.nn.functional.layer_norm(a + b, shape[-1:], weight, bias, spec.eps)
    if spec.kind == "rms":
        truth = torch.nn.functional.rms_norm(a + b, shape[-1:], weight, spec.eps)
    dy = torch.randn(shape, generator=generator, dtype=dtype)
    ours, again, of_made, exact = (torch.autograd.grad(z, trained, dy, retain_graph=True) for z in (y, y, made, truth))
    assert torch.equal(y, made)
    # Roundings of fp64 along a row, and where terms of the gradient cancel, as many times the largest gradient.
    limit = 64 * torch.finfo(dtype).eps * shape[-1] * max(float(each.abs().max()) for each in exact)
    for one, two, three, four in zip(ours, again, of_made, exact, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)
        assert float((one - four).abs().max()) <= limit


SIXTEEN_BITS = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("rows", [5, 3000], ids=["at once", "by parts"])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
def test_a_16_bit_norm_that_rounds_after_its_weight_can_save_its_input(dtype, offset, rows, monkeypatch):
    monkeypatch.setattr("memopt.kernels.base.pieces.LEAST", 48 * 300)
    x, weight, _, spec = make(("rms", offset, True, False), (rows, 48), dtype)
    dy = torch.randn(rows, 48, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    made = x * 1
    y = ms_norm(made, weight, None, spec, dtype, keeps_input=True)
    node = y.grad_fn
    assert node.saved_tensors[0].data_ptr() == made.data_ptr()
    assert torch.equal(node.recomputed.function(*node.saved_tensors), y)
    assert torch.equal(y, ms_norm(x, weight, None, spec, dtype))
    ours = torch.autograd.grad(y, (x, weight), dy)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    truth = torch.autograd.grad(plain(exact[0], exact[1], None, spec), exact, dy.double())
    for mine, right, count in zip(ours, truth, (48, rows), strict=True):
        # One rounding of the result, and fp32's of sums of `count` products.
        bound = torch.finfo(dtype).eps / 2 * right.abs() + count * torch.finfo(torch.float32).eps * right.abs().max()
        assert ((mine.double() - right).abs() <= bound + torch.finfo(dtype).tiny).all()


def larger(x: Tensor) -> Tensor:
    return torch.cat((x, x), -1)[..., : x.size(-1)]


@pytest.mark.parametrize(
    ("family", "cast", "dtype", "given"),
    [
        (("rms", 0, True, False), "after", torch.float32, {}),
        (("rms", 0, True, False), "before", torch.bfloat16, {}),
        (("layer", 0, True, False), "after", torch.bfloat16, {}),
        (("rms", 0, False, False), "after", torch.bfloat16, {}),
        (("rms", 0, True, False), "after", torch.bfloat16, {"of": larger}),
        (("rms", 0, True, False), "after", torch.bfloat16, {"of": lambda x: x.detach().requires_grad_()}),
        (("rms", 0, True, False), "after", torch.bfloat16, {"residual": torch.ones(5, 48, dtype=torch.bfloat16)}),
        (("rms", 0, True, False), "after", torch.float32, {"kept_dtype": torch.bfloat16}),
    ],
    ids=["fp32", "rounds before", "layer norm", "no weight", "a part", "a parameter", "a sum", "fp32 input"],
)
def test_other_norms_save_x_hat(family, cast, dtype, given):
    x, weight, bias, spec = make(family, (5, 48), dtype, cast)
    given = {"of": lambda x: x * 1, **given}
    x = given.pop("of")(x)
    y = ms_norm(x, weight, bias, spec, dtype, keeps_input=True, **given)
    assert y.grad_fn.saved_tensors[0].untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
