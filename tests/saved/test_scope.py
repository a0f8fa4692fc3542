"""Inside a scope, gradients are autograd's own and fewer bytes are kept."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memopt.kernels.norm.function import NormSpec, ms_norm
from memopt.recompute.rules import ELEMENTWISE, PRODUCT
from memopt.saved import RecomputeScope
from tests.saved.builders import Observer, Scoped, gradients, make_mlp
from tests.support.compare import all_equal

ACTIVATIONS = [
    F.silu, F.gelu, lambda z: F.gelu(z, approximate="tanh"), F.mish, F.hardswish, lambda z: F.leaky_relu(z, 0.2),
    lambda z: F.elu(z, 1.3), F.selu, lambda z: F.softplus(z, 2.0, 5.0), F.relu6, F.hardsigmoid,
    lambda z: F.celu(z, 1.2), F.logsigmoid, lambda z: z.clamp(-0.5, 0.7), lambda z: z.clamp(max=0.5),
]  # fmt: skip


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_are_bitwise_those_of_autograd(activation):
    model, x = make_mlp(activation)
    stock = gradients(model, model(x).square().sum(), x)
    assert all_equal(stock, gradients(model, Scoped(model)(x).square().sum(), x))


def test_a_gated_mlp_keeps_gate_up_and_its_input_only():
    model, x = make_mlp()
    counts = []
    for candidate in (model, Scoped(model)):
        observer = Observer(model)
        with saved_tensors_hooks(observer, lambda t: t):
            candidate(x)
        counts.append(observer.elements)
    hidden, intermediate = 2 * 3 * 8, 2 * 3 * 16
    assert counts == [hidden + 4 * intermediate, hidden + 2 * intermediate]


def test_squared_relu_is_recomputed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    model[1].forward = lambda z: F.relu(z).pow(2)
    x = torch.randn(4, 8, requires_grad=True)
    stock = gradients(model, model(x).sum(), x)
    observer = Observer(model)
    with saved_tensors_hooks(observer, lambda t: t):
        loss = Scoped(model)(x).sum()
    assert all_equal(stock, gradients(model, loss, x))
    assert observer.elements == 4 * 8 + 4 * 16


def test_a_second_backward_of_a_retained_graph_gives_the_same_gradients():
    model, x = make_mlp()
    stock = gradients(model, model(x).square().sum(), x)
    loss = Scoped(model)(x).square().sum()
    assert all_equal(stock, gradients(model, loss, x, retain_graph=True))
    assert all_equal(stock, gradients(model, loss, x, retain_graph=True))
    assert all_equal(stock, gradients(model, loss, x))


def silus_made(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Tensor]]:
    """The results of `F.silu` from now on."""
    made: list[weakref.ref[Tensor]] = []
    silu = F.silu

    def counting_silu(z):
        value = silu(z)
        made.append(weakref.ref(value))
        return value

    monkeypatch.setattr(F, "silu", counting_silu)
    return made


def test_the_recomputed_tensor_is_made_once_and_let_go_after_its_last_holder(monkeypatch):
    torch.manual_seed(0)
    first, readers = nn.Linear(8, 8), [nn.Linear(8, 8) for _ in range(3)]
    x = torch.randn(4, 8, requires_grad=True)
    with RecomputeScope():
        h = F.silu(first(x))
        loss = sum(reader(h).square().sum() for reader in readers)
    del h
    made = silus_made(monkeypatch)
    loss.backward(retain_graph=True)
    gc.collect()
    assert len(made) == 1
    assert made[0]() is None
    loss.backward()
    assert len(made) == 2


def test_an_autocast_region_around_backward_does_not_reach_what_is_recomputed(monkeypatch):
    seen: list[bool] = []
    silu = F.silu

    def watching_silu(z):
        seen.append(torch.is_autocast_enabled("cpu"))
        return silu(z)

    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    with RecomputeScope():
        loss = second(silu(first(torch.randn(4, 8)))).square().sum()
    monkeypatch.setattr(F, "silu", watching_silu)
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()
    assert seen == [False]


def test_a_partial_backward_does_not_leave_a_recomputed_tensor_behind(monkeypatch):
    torch.manual_seed(0)
    first, a, b = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
    x = torch.randn(4, 8, requires_grad=True)
    with RecomputeScope():
        h = F.silu(first(x))
        loss_a, loss_b = a(h).sum(), b(h).sum()
    del h
    made = silus_made(monkeypatch)
    loss_a.backward(retain_graph=True)  # b, the other holder, never asks
    gc.collect()
    assert [ref() for ref in made] == [None]
    assert loss_b.requires_grad


def test_views_of_a_product_are_recomputed_with_their_own_layout():
    torch.manual_seed(0)
    gate, up, down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(3, 8)
    x = torch.randn(2, 5, 8, requires_grad=True)
    modules = nn.ModuleList([gate, up, down])

    def forward() -> Tensor:
        product = F.silu(gate(x)) * up(x)
        return down(product.view(2, 5, 4, 3)[:, :, 1:].transpose(1, 2))

    stock = gradients(modules, forward().square().sum(), x)
    with RecomputeScope():
        loss = forward().square().sum()
    assert all_equal(stock, gradients(modules, loss, x))


def test_halves_of_a_fused_gate_and_up_are_kept_once():
    torch.manual_seed(0)
    fused, down = nn.Linear(8, 32), nn.Linear(16, 8)
    modules = nn.ModuleList([fused, down])
    x = torch.randn(4, 8, requires_grad=True)

    def forward() -> Tensor:
        gate, up = fused(x).chunk(2, -1)
        return down(F.silu(gate) * up)

    stock = gradients(modules, forward().square().sum(), x)
    observer = Observer(modules)
    with saved_tensors_hooks(observer, lambda t: t), RecomputeScope():
        loss = forward().square().sum()
        kept = observer.elements - 4 * 8  # the square keeps its operand
    assert kept == 4 * 8 + 4 * 32
    assert all_equal(stock, gradients(modules, loss, x))


def test_an_in_place_change_of_a_kept_tensor_is_still_an_error():
    model, x = make_mlp()
    with RecomputeScope():
        z = model.gate(x)
        loss = (z * z.detach()).sum() + F.silu(z).sum()
    with torch.no_grad():
        z.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_tensor_changed_in_place_is_not_recomputed_from_old_operands():
    model, x = make_mlp()

    def forward() -> Tensor:
        product = F.silu(model.gate(x)) * model.up(x)
        with torch.no_grad():
            product.mul_(2)
        return model.down(product).square().sum()

    stock = gradients(model, forward(), x)
    with RecomputeScope():
        loss = forward()
    assert all_equal(stock, gradients(model, loss, x))


def test_families_switch_rules_off():
    model, x = make_mlp()
    counts = {}
    for families in (frozenset(), frozenset({ELEMENTWISE}), frozenset({ELEMENTWISE, PRODUCT})):
        observer = Observer(model)
        with saved_tensors_hooks(observer, lambda t: t):
            Scoped(model, families)(x)
        counts[len(families)] = observer.elements
    intermediate = 2 * 3 * 16
    assert counts[0] - counts[1] == intermediate
    assert counts[1] - counts[2] == intermediate


def test_the_graph_is_freed_when_it_is_dropped():
    model, x = make_mlp()
    with RecomputeScope():
        h = F.silu(model.gate(x)) * model.up(x)
        loss = model.down(h).sum()
    node = weakref.ref(h)
    gc.collect()
    gc.disable()
    try:
        del h, loss
        assert node() is None
    finally:
        gc.enable()


def test_accumulated_gradients_are_the_stock_ones():
    model, x = make_mlp()

    def accumulate(candidate: nn.Module) -> list[Tensor]:
        model.zero_grad()
        for step in range(3):
            candidate(x * (step + 1)).square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    assert all_equal(accumulate(model), accumulate(Scoped(model)))


def test_a_product_seen_as_complex_numbers_gets_the_stock_gradient():
    torch.manual_seed(0)
    a, b, w = (torch.randn(4, 16, requires_grad=True) for _ in range(3))

    def run() -> list[Tensor]:
        c, d = (torch.view_as_complex(t.view(4, 8, 2)) for t in (a * b, w))
        return list(torch.autograd.grad((c * d).abs().sum(), (a, b, w)))

    stock = run()
    with RecomputeScope():
        ours = run()
    assert all_equal(stock, ours)


def test_conjugates_of_a_product_get_the_stock_gradient():
    torch.manual_seed(0)
    a, b, w = (torch.randn(4, 8, dtype=torch.complex64, requires_grad=True) for _ in range(3))

    def run() -> list[Tensor]:
        return list(torch.autograd.grad(((a * b).conj() * w).abs().sum(), (a, b, w)))

    stock = run()
    with RecomputeScope():
        ours = run()
    assert all_equal(stock, ours)


def test_a_sparse_product_is_kept_as_it_is():
    a = torch.eye(4).to_sparse().requires_grad_()
    b = torch.eye(4).to_sparse().requires_grad_()
    w = torch.randn(4, 4, requires_grad=True)
    with RecomputeScope():
        loss = torch.sparse.mm(a * b, w).sum()
    loss.backward()
    assert w.grad is not None


def test_a_function_of_the_users_with_our_name_is_not_taken_for_ours():
    class NormFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, dy):
            return dy * 2

    x, reader = torch.randn(4, 8, requires_grad=True), nn.Linear(8, 8)
    with RecomputeScope():
        loss = reader(NormFunction.apply(x)).sum()
    loss.backward()
    assert torch.equal(reader.weight.grad, (x.detach() * 2).sum(0).expand(8, 8))


def test_an_operation_that_backward_has_been_through_is_no_source():
    x, y, reader = (torch.randn(8, 8, requires_grad=True) for _ in range(3))
    with RecomputeScope():
        h = (x * 1) * (y * 1)
        h.sum().backward()
        loss = (h @ reader).sum()
    (gradient,) = torch.autograd.grad(loss, reader)
    torch.testing.assert_close(gradient, h.detach().sum(0)[:, None].expand(8, 8))


def test_a_node_that_backward_has_been_through_is_no_source():
    x = torch.randn(6, 8, requires_grad=True)
    readers = [torch.randn(8, 3, requires_grad=True) for _ in range(2)]
    with RecomputeScope():
        h = ms_norm(x, torch.ones(8, requires_grad=True), None, NormSpec("rms", 1e-5), x.dtype)
        h.sum().backward()
        losses = [(h @ reader).sum() for reader in readers]
    for loss, reader in zip(losses, readers, strict=True):
        (gradient,) = torch.autograd.grad(loss, reader)
        torch.testing.assert_close(gradient, h.detach().sum(0)[:, None].expand(8, 3))


def test_a_handle_of_an_output_that_an_earlier_backward_has_freed_names_its_operation_and_the_way_out():
    """Stock: the second loss stops before the norm, so nothing that it needs has been freed."""
    norm, reader = nn.LayerNorm(8), nn.Linear(8, 4)
    x, spec = torch.randn(3, 8), NormSpec("layer", 1e-5)
    with RecomputeScope():
        y = ms_norm(x, norm.weight, norm.bias, spec, x.dtype)
        loss = F.linear(y * 2, reader.weight).square().sum()
    y.sum().backward()
    with pytest.raises(RuntimeError, match=r"output of NormFunctionBackward.*retain_graph=True to the earlier"):
        torch.autograd.grad(loss, reader.weight)


def test_a_handle_of_an_output_that_an_earlier_backward_retained_gives_the_gradient():
    norm, reader = nn.LayerNorm(8), nn.Linear(8, 4)
    x, spec = torch.randn(3, 8), NormSpec("layer", 1e-5)
    (expected,) = torch.autograd.grad(reader(norm(x) * 2).sum(), reader.weight)
    with RecomputeScope():
        y = ms_norm(x, norm.weight, norm.bias, spec, x.dtype)
        loss = F.linear(y * 2, reader.weight).sum()
    y.sum().backward(retain_graph=True)
    assert torch.allclose(expected, torch.autograd.grad(loss, reader.weight)[0])
