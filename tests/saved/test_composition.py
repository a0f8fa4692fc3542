"""Scopes among other hooks: checkpointing, offloading, autocast, sharding, other scopes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import memopt
from memopt.kernels.norm.function import NormSpec, ms_norm
from memopt.recompute.rules import FAMILIES, LINEAR
from memopt.saved import RecomputeScope
from tests.factories import tiny_inputs, tiny_model
from tests.saved.builders import GatedMLP, Observer, Scoped, gradients, make_mlp
from tests.support.compare import all_equal


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_it_works_inside_activation_checkpointing(use_reentrant):
    model, x = make_mlp()
    stock = gradients(model, model(x * 1).square().sum(), x)
    scoped = Scoped(model)
    loss = checkpoint(scoped, x * 1, use_reentrant=use_reentrant).square().sum()
    assert all_equal(stock, gradients(model, loss, x))


def test_a_checkpointed_region_keeps_nothing_but_its_input():
    model, x = make_mlp()
    scoped = Scoped(model)
    sizes: list[int] = []

    class Live(Observer):
        def __call__(self, tensor):
            sizes.append(tensor.numel())
            return super().__call__(tensor)

    with saved_tensors_hooks(Live(model), lambda t: t):
        checkpoint(scoped, x * 1, use_reentrant=False)
    assert sum(sizes) == 0 or max(sizes) <= x.numel()


def test_checkpointing_survives_a_retained_graph():
    model, x = make_mlp()
    stock = gradients(model, model(x * 1).square().sum(), x)
    loss = checkpoint(Scoped(model), x * 1, use_reentrant=False).square().sum()
    assert all_equal(stock, gradients(model, loss, x, retain_graph=True))
    assert all_equal(stock, gradients(model, loss, x))


def test_a_chain_of_checkpointed_scopes_recomputes_the_same_tensors():
    torch.manual_seed(0)
    blocks = nn.ModuleList([GatedMLP(), GatedMLP(), GatedMLP()])
    # The block's input is itself a product: detached in the recompute, not in the first run.
    scoped = [Scoped(block) for block in blocks]
    scale = nn.Parameter(torch.randn(8))
    x = torch.randn(2, 3, 8, requires_grad=True)

    def forward(wrap: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
        y = x
        for block in scoped:
            y = wrap(block, y * scale)
        return y.square().sum()

    stock = gradients(blocks, forward(lambda block, y: block.inner(y)), x)
    wrapped = forward(lambda block, y: checkpoint(block, y, use_reentrant=False))
    assert all_equal(stock, gradients(blocks, wrapped, x))


def test_a_region_may_run_again_in_a_thread_with_sequence_numbers_of_its_own():
    """As in the thread of a GPU. The region reads a product that was made outside, with its graph."""
    torch.manual_seed(0)
    x, down = torch.randn(3, 8, requires_grad=True), nn.Linear(8, 8)
    product = x.cos() * x.sin()

    def region(one: Tensor) -> Tensor:
        with RecomputeScope():
            return down(product) * one

    stock = gradients(down, down(product).square().sum(), x, retain_graph=True)
    loss = checkpoint(region, torch.ones(8, requires_grad=True), use_reentrant=False).square().sum()
    with ThreadPoolExecutor(1) as thread:
        assert all_equal(stock, thread.submit(gradients, down, loss, x).result())


@pytest.mark.parametrize("reader", ["the scope", "a scope inside"])
@pytest.mark.parametrize("producer", ["before", "the scope", "a scope inside"])
def test_under_a_foreign_hook_a_scope_recomputes_what_is_made_inside_it(producer: str, reader: str) -> None:
    down, kept = nn.Linear(8, 8), []

    def run(where: str, call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        # Another set of families: two scopes alike are one.
        with RecomputeScope(FAMILIES - {LINEAR}) if where == "a scope inside" else nullcontext():
            return call(x)

    def product(x: Tensor) -> Tensor:
        return x * x.sin()

    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        x = torch.randn(3, 8, requires_grad=True) * 1
        y = product(x) if producer == "before" else x
        with RecomputeScope():
            y = y if producer == "before" else run(producer, product, y)
            run(reader, down, y)
    assert any(each is y for each in kept) is (producer == "before" or reader == "a scope inside")


def test_it_hands_what_it_keeps_to_an_outer_offloading_hook():
    model, x = make_mlp()
    stock = gradients(model, model(x).square().sum(), x)
    with torch.autograd.graph.save_on_cpu():
        loss = Scoped(model)(x).square().sum()
    assert all_equal(stock, gradients(model, loss, x))


def test_nothing_happens_without_gradients_or_inside_another_scope():
    model, x = make_mlp()
    with torch.no_grad(), RecomputeScope():
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    with RecomputeScope():
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        with RecomputeScope():
            assert torch._C._autograd._top_saved_tensors_default_hooks(False)[0] is outer[0]
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert model(x).requires_grad


def test_an_error_inside_leaves_no_hook_behind():
    with pytest.raises(ValueError, match="inside"), RecomputeScope():
        raise ValueError("inside")
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_a_cast_copy_of_a_norm_output_under_autocast_is_not_kept():

    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(8))
    readers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
    x = torch.randn(4, 8, requires_grad=True)
    spec = NormSpec("rms", 1e-6)

    def run(scope: bool) -> tuple[int, Tensor]:
        observer = Observer(readers)
        with (
            saved_tensors_hooks(observer, lambda t: t),
            torch.autocast("cpu", torch.bfloat16),
            RecomputeScope() if scope else nullcontext(),
        ):
            y = ms_norm(x, weight, None, spec, torch.float32, torch.bfloat16)
            loss = sum(reader(y).float().sum() for reader in readers)
        copies = sum(t.dtype == torch.bfloat16 and t.shape == (4, 8) for t in observer.kept.values())
        return copies, loss

    assert run(False)[0] == 4  # x_hat and one copy a linear
    copies, loss = run(True)
    assert copies == 1
    loss.backward()
    assert x.grad.isfinite().all()


def test_the_freed_storage_of_a_parameter_is_not_read():
    """Sharded training frees a parameter after its module's forward, and may gather it too late for its readers."""

    torch.manual_seed(0)
    x, reader = torch.randn(4, 8, requires_grad=True), nn.Linear(8, 8)
    weight, bias = (nn.Parameter(torch.randn(8)) for _ in range(2))
    spec = NormSpec("layer", 1e-5)
    stock = torch.autograd.grad(reader(ms_norm(x, weight, bias, spec, x.dtype)).sum(), [reader.weight, x])
    with RecomputeScope():
        loss = reader(ms_norm(x, weight, bias, spec, x.dtype)).sum()
    weight.untyped_storage().resize_(0)
    bias.untyped_storage().resize_(0)
    assert all_equal(list(stock), list(torch.autograd.grad(loss, [reader.weight, x])))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("producer", ["activation", "product"])
def test_a_checkpoint_around_the_producer_alone_works(producer, use_reentrant):
    torch.manual_seed(0)
    up, down = nn.Linear(8, 16), nn.Linear(16, 8)
    modules, x = nn.ModuleList([up, down]), torch.randn(2, 3, 8, requires_grad=True)

    def produce(z):
        return F.gelu(z) if producer == "activation" else z * F.silu(z)

    def forward():
        return down(checkpoint(produce, up(x), use_reentrant=use_reentrant))

    stock = gradients(modules, forward().square().sum(), x)
    with RecomputeScope():
        loss = forward().square().sum()
    assert all_equal(stock, gradients(modules, loss, x))


def test_one_scope_that_is_entered_twice_is_left_twice():
    scope = RecomputeScope()
    with scope, torch.autograd.graph.save_on_cpu(), scope:
        pass
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_a_reader_behind_a_checkpointed_block_does_not_run_it_again_before_its_gradient_is_there() -> None:
    """Sharding gathers the weights of a block when the gradient of its output arrives."""
    torch.manual_seed(0)
    model = memopt.patch(get_peft_model(tiny_model("bert"), LoraConfig(r=4, target_modules="all-linear")).train())
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    order: list[str] = []
    block = model.base_model.model.bert.encoder.layer[-1]
    block.register_forward_hook(lambda _, given, y: y.register_hook(lambda dy: order.append("gradient")) and None)
    block.attention.register_forward_pre_hook(lambda *call: order.append("run"))
    for _ in range(2):
        order.clear()
        model(**tiny_inputs("bert", 2, 24)).loss.backward()
        assert order == ["run", "gradient", "run"]
