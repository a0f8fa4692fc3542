"""A linear that saves what its input is recomputed from: when it reads the spec, and what it saves."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from memopt.kernels.linear.function import linear, reads_spec
from memopt.recompute.specs import Recomputed, attach_spec, keep_producer
from tests.support.compare import gradients_of_squares


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def sin_again(
    dh: Callable[[], Tensor],
    inputs: tuple[Tensor, ...],
    use: Callable[[Tensor], None] | None,
    given_once: bool,
    calls: list[int],
) -> tuple[Tensor, ...]:
    calls.append(1)
    if use is not None:
        use(torch.sin(inputs[0]))
    return (dh() * torch.cos(inputs[0]),)


def offered(z: Tensor, calls: list[int]) -> Tensor:
    """sin(z) with a spec; `calls` counts the backwards that recompute it on the way."""
    h = torch.sin(z)
    attach_spec(h, (z,), Recomputed(torch.sin), differentiate=functools.partial(sin_again, calls=calls))
    return h


def assert_same(ours: tuple[Tensor, ...], stock: tuple[Tensor, ...]) -> None:
    for a, b in zip(ours, stock, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (0,)], ids=str)
def test_values_and_gradients_are_those_of_the_stock_linear(leading, has_bias, transposed):
    z, parameter = draw(*leading, 6), draw(6, 4, seed=1) if transposed else draw(4, 6, seed=1)
    bias = draw(4, seed=2) if has_bias else None
    inputs = [t for t in (z, parameter, bias) if t is not None]
    weight = parameter.t() if transposed else parameter
    calls: list[int] = []
    ours = linear(offered(z, calls), weight, bias)
    stock = F.linear(torch.sin(z), weight, bias)
    assert torch.equal(ours, stock)
    assert_same(gradients_of_squares(ours, inputs), gradients_of_squares(stock, inputs))
    assert calls


def test_the_output_may_be_changed_in_place():
    z, weight, bias = draw(2, 3, 6), draw(4, 6, seed=1), draw(4, seed=2)
    ours, stock = linear(offered(z, []), weight, bias), F.linear(torch.sin(z), weight, bias)
    for y in (ours, stock):
        y[:, 0].mul_(2)
    assert_same(gradients_of_squares(ours, [z, weight, bias]), gradients_of_squares(stock, [z, weight, bias]))


def test_the_gradient_of_a_transposed_weight_has_the_layout_of_its_parameter():
    z, parameter = draw(3, 6), draw(6, 4, seed=1)
    linear(offered(z, []), parameter.t(), None).sum().backward()
    assert parameter.grad.is_contiguous()


def test_the_input_is_not_kept():
    z, weight = draw(5, 6), draw(4, 6, seed=1)
    kept = []
    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        h = offered(z, [])
        kept.clear()  # what the sine keeps
        linear(h, weight, None)
    assert [t.data_ptr() for t in kept] == [weight.data_ptr(), z.data_ptr()]


CHANGES = {
    "it has no spec": lambda h: h.clone(),
    "it was viewed": lambda h: h.view(h.shape),
    "it was changed in place": lambda h: h.add_(2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_without_a_spec_on_this_very_tensor_the_stock_linear_runs(change):
    z, weight = draw(5, 6), draw(4, 6, seed=1)
    calls: list[int] = []
    changed = CHANGES[change](offered(z, calls))
    assert not reads_spec(changed, weight)
    ours, stock = linear(changed, weight, None), F.linear(CHANGES[change](torch.sin(z).clone()), weight)
    assert_same(gradients_of_squares(ours, [z, weight]), gradients_of_squares(stock, [z, weight]))
    assert not calls


def test_an_input_that_was_changed_since_is_not_read_again():
    z = draw(5, 6).detach()
    parameter = draw(6, seed=3)
    source = z * parameter
    h = offered(source, [])
    source.detach().zero_()
    assert not reads_spec(h, draw(4, 6))


def test_a_frozen_weight_takes_the_stock_linear():
    z, weight = draw(5, 6), draw(4, 6, seed=1).detach()
    calls: list[int] = []
    linear(offered(z, calls), weight, None).sum().backward()
    assert not calls
    assert z.grad is not None


def test_a_spec_goes_with_its_tensor():
    z, weight = draw(5, 6), draw(4, 6, seed=1)
    h = offered(z, [])
    assert reads_spec(h, weight)
    del h
    assert not reads_spec(torch.sin(z), weight)
    assert not reads_spec("not a tensor", weight)


@pytest.mark.parametrize("fuses", [True, False])
def test_one_reader_at_most_takes_the_place_of_the_producers_backward(fuses):
    z, weights = draw(5, 6), [draw(4, 6, seed=seed) for seed in (1, 2, 3)]
    calls: list[int] = []
    h = offered(z, calls)
    ours = sum(linear(h, weight, None, fuses=fuses) for weight in weights)
    stock = sum(F.linear(torch.sin(z), weight) for weight in weights)
    assert_same(gradients_of_squares(ours, [z, *weights]), gradients_of_squares(stock, [z, *weights]))
    assert len(calls) == int(fuses)


WANTED_ITSELF = {
    "a hook": lambda h: h.register_hook(lambda gradient: gradient / 2),
    "retain_grad": lambda h: h.retain_grad(),
    "the producer stays": keep_producer,
}


@pytest.mark.parametrize("wish", WANTED_ITSELF)
def test_a_producer_whose_output_is_read_stays_in_the_graph(wish):
    z, weight = draw(5, 6), draw(4, 6, seed=1)
    results = []
    for made in (offered(z, []), torch.sin(z)):
        WANTED_ITSELF[wish](made)
        results.append((*gradients_of_squares(linear(made, weight, None), [z, weight]), made.grad_fn is None))
    assert_same(results[0][:2], results[1][:2])


class Sixteen(torch.nn.Parameter):
    """A weight with its own idea of a linear."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs or {})
        return 16 * result if function is F.linear else result


def test_a_weight_of_another_type_keeps_its_own_linear():
    z = draw(5, 6)
    weight = Sixteen(draw(4, 6, seed=1).detach())
    ours, stock = linear(offered(z, []), weight, None), F.linear(torch.sin(z), weight)
    assert torch.equal(ours, stock)
    assert_same(torch.autograd.grad(ours.sum(), z), torch.autograd.grad(stock.sum(), z))


def test_a_checkpoint_around_the_linear_alone_works():
    z, weight = draw(5, 6), draw(4, 6, seed=1)
    stock = gradients_of_squares(F.linear(torch.sin(z), weight), [z, weight])
    ours = gradients_of_squares(checkpoint(linear, offered(z, []), weight, None, use_reentrant=False), [z, weight])
    assert_same(ours, stock)


@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16], ids=str)
def test_under_autocast_everything_is_as_in_the_stock_linear(parameters):
    z, weight, bias = draw(5, 6, dtype=torch.bfloat16), draw(4, 6, dtype=parameters), draw(4, dtype=parameters)
    with torch.autocast("cpu", torch.bfloat16):
        ours, stock = linear(offered(z, []), weight, bias), F.linear(torch.sin(z), weight, bias)
    assert torch.equal(ours, stock)
    inputs = [z, weight, bias]
    for a, b in zip(gradients_of_squares(ours, inputs)[1:], gradients_of_squares(stock, inputs)[1:], strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("fuses", [False, True])
def test_under_autocast_the_weight_itself_is_saved_and_not_a_copy_for_each_use(fuses):
    z, weight, bias = draw(5, 6, dtype=torch.bfloat16), draw(4, 6, dtype=torch.float32), draw(4, dtype=torch.float32)
    saved: list[Tensor] = []
    hooks = saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor)
    with torch.autocast("cpu", torch.bfloat16), hooks:
        x = offered(z, [])
        saved.clear()  # what the sine saves
        y = linear(x, weight, bias, fuses=fuses)
    assert {tensor.data_ptr() for tensor in saved} == {z.data_ptr(), weight.data_ptr()}
    y.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


def test_a_cast_of_autocast_is_no_node_of_its_own_and_changes_no_gradient():
    """Each reader has one node between itself and the norm, and gives the norm's output a gradient in its dtype."""
    weights, inputs = [draw(4, 6, dtype=torch.float32, seed=seed) for seed in (1, 2)], draw(5, 6, dtype=torch.float32)
    found: list[list[Tensor]] = []
    for run in (functools.partial(linear, fuses=True), F.linear):
        seen: list[Tensor] = []
        h = offered(inputs, [])
        h.register_hook(seen.append)
        with torch.autocast("cpu", torch.bfloat16):
            outputs = [run(h, weight, None) for weight in weights]
        names = [y.grad_fn.next_functions[0][0].name() for y in outputs]
        gradients = torch.autograd.grad(sum(y.square().sum() for y in outputs), [inputs, *weights])
        found.append([*outputs, *seen, *gradients])
        if run is not F.linear:
            assert names == [h.grad_fn.name()] * 2
    for ours, stock in zip(*found, strict=True):
        assert ours.dtype == stock.dtype
        assert torch.equal(ours, stock)


@pytest.mark.parametrize("fuses", [True, False], ids=["fused", "recomputed"])
def test_a_backward_that_is_run_under_autocast_computes_in_the_dtype_of_the_forward(fuses: bool) -> None:
    z, weight, bias = (draw(*shape, dtype=torch.float32, seed=n) for n, shape in enumerate(((3, 6), (4, 6), (4,))))

    def gradients(region: bool) -> tuple[Tensor, ...]:
        y = linear(offered(z, []), weight, bias, fuses=fuses)
        with torch.autocast("cpu", torch.bfloat16, enabled=region):
            return torch.autograd.grad(y, (z, weight, bias), torch.ones_like(y))

    for inside, outside in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(inside, outside)
