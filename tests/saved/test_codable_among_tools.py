"""Codes of activations beside hooks, checkpointing, autocast, copies and compilation: a gradient, and no trace left."""

from __future__ import annotations

import copy
import io
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import memopt
from memopt.saved.kept import APPLY
from memopt.trace.account import live_bytes
from tests import factories
from tests.saved.codable import Block, built, gradients, inputs, is_approximate, is_exact, pair


def test_after_backward_nothing_is_left_however_long_the_loss_stays() -> None:
    for frozen in (False, True):
        _, patched = pair(built(frozen=frozen))
        for parameter in patched.parameters():
            parameter.grad = torch.zeros_like(parameter)
        x = inputs()

        def run(model: nn.Module = patched, x: Tensor = x) -> Tensor:
            loss: Tensor = model(x).mean()
            loss.backward()
            return loss

        assert live_bytes(run) < 64


@pytest.mark.parametrize("frozen", [False, True])
def test_a_second_backward_gives_the_same_gradient(frozen: bool) -> None:
    _, patched = pair(built(frozen=frozen), "approx-4bit")
    loss, bias = patched(inputs()).square().sum(), patched.layers[0].up.bias
    (first,) = torch.autograd.grad(loss, [bias], retain_graph=True)
    (second,) = torch.autograd.grad(loss, [bias])
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, [bias])


@pytest.mark.parametrize("recipe", ["approx-2bit", "approx-4bit"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_second_derivative_is_refused(frozen: bool, recipe: str) -> None:
    _, patched = pair(built(frozen=frozen), recipe)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(patched(inputs()).sum(), [patched.layers[0].up.bias], create_graph=True)


def test_batched_gradients_are_those_of_each_row() -> None:
    _, patched = pair(built(frozen=True))
    y, bias = patched(inputs()), patched.layers[0].up.bias
    rows = torch.randn(3, *y.shape)
    (together,) = torch.autograd.grad(y, [bias], rows, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(y, [bias], row, retain_graph=True)[0] for row in rows]
    torch.testing.assert_close(together, torch.stack(each))


def test_function_transforms_are_exact() -> None:
    stock, patched = pair(built(frozen=True))
    a, b = (torch.func.vmap(torch.func.grad(lambda x, m=m: m(x).square().sum()))(inputs()) for m in (stock, patched))
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_checkpointing_around_a_block_gives_a_gradient(frozen: bool, use_reentrant: bool) -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        for layer in model.layers:
            x = checkpoint(layer, x, use_reentrant=use_reentrant)
        return x

    stock, patched = pair(built(frozen=frozen))
    # The region keeps nothing, or is run again inside backward, where all is used up at once: exact costs as little.
    assert is_exact(stock, patched, forward=forward)


class ChecksItsMLP(Block):
    use_reentrant = False

    def mlp(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.act(self.up(x)))
        return y

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x + self.mlp(x)
        y: Tensor = x + checkpoint(self.mlp, x, use_reentrant=self.use_reentrant)
        return y


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_inside_a_block_that_trains_is_exact(use_reentrant: bool) -> None:
    model = built(ChecksItsMLP)
    for layer in model.layers:
        layer.use_reentrant = use_reentrant
    assert is_exact(*pair(model))


@pytest.mark.parametrize(
    "outer", [saved_tensors_hooks(lambda t: t.clone(), lambda t: t), torch.autograd.graph.save_on_cpu()]
)
def test_under_a_hook_of_somebody_it_is_exact(outer: saved_tensors_hooks) -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        with outer:
            y: Tensor = model(x)
            return y

    assert is_exact(*pair(built(frozen=True)), forward=forward)


def test_where_hooks_are_disabled_it_runs() -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
            y: Tensor = model(x)
            return y

    assert is_exact(*pair(built(frozen=True)), forward=forward)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_have_the_dtype_of_the_model(frozen: bool, dtype: torch.dtype) -> None:
    stock, patched = pair(built(frozen=frozen).to(dtype), x=inputs(dtype))
    a, b = gradients(stock, inputs(dtype)), gradients(patched, inputs(dtype))
    assert b.dtype == dtype
    assert float((a - b).double().norm() / a.double().norm()) < (0.5 if frozen else 0.02)


@pytest.mark.parametrize("frozen", [False, True])
def test_autocast_gives_a_gradient(frozen: bool) -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y: Tensor = model(x).float()
            return y

    stock, patched = pair(built(frozen=frozen))
    a, b = gradients(stock, inputs(), forward), gradients(patched, inputs(), forward)
    assert float((a - b).norm() / a.norm()) < (0.5 if frozen else 0.02)


def test_an_empty_batch_runs() -> None:
    stock, patched = pair(built(frozen=True))
    assert is_exact(stock, patched, inputs()[:0])


def test_without_gradients_it_is_the_stock_module() -> None:
    stock, patched = pair(built(frozen=True).eval())
    with torch.no_grad():
        assert torch.equal(stock(inputs()), patched(inputs()))
    with torch.inference_mode():
        assert torch.equal(stock(inputs()), patched(inputs()))


def test_nan_stays_nan() -> None:
    x = inputs()
    x[0, 3, 2] = float("nan")
    _, patched = pair(built(frozen=True))
    x = x.requires_grad_()
    (dx,) = torch.autograd.grad(patched(x).square().sum(), [x])
    assert dx[0, 3].isnan().any()


class Broken(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.up(x))
        if x.shape[0] == 1:
            raise ValueError("inside")
        return x + self.down(h)


def test_an_error_inside_leaves_no_hook_behind() -> None:
    stock, patched = pair(built(Broken, frozen=True))
    with pytest.raises(ValueError, match="inside"):
        patched(inputs()[:1])
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert is_approximate(stock, patched)


def test_a_hook_that_changes_the_output_is_obeyed() -> None:
    def change(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * 1.5 + 0.1

    stock, patched = pair(built())
    for model in (stock, patched):
        model.layers[0].act.register_forward_hook(change)
    assert torch.equal(stock(inputs()), patched(inputs()))
    assert is_approximate(stock, patched)  # the linear keeps what the hook made, and nobody the output


def test_retained_gradients_inside_are_stocks() -> None:
    kept: list[Tensor] = []

    def retain(module: nn.Module, args: Any, output: Tensor) -> None:
        output.retain_grad()
        kept.append(output)

    stock, patched = pair(built(frozen=True))
    for model in (stock, patched):
        model.layers[1].act.register_forward_hook(retain)
        model(inputs()).sum().backward()
    assert torch.allclose(kept[0].grad, kept[1].grad)


def test_unpatched_it_is_exact_again() -> None:
    stock, patched = pair(built(frozen=True))
    memopt.unpatch(patched)
    assert type(patched.layers[0].act) is nn.GELU
    assert torch.equal(gradients(stock, inputs()), gradients(patched, inputs()))


class OwnActivation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.3 * x)


class WithOwnActivation(Block):
    def __init__(self) -> None:
        super().__init__()
        self.act = OwnActivation()


@pytest.mark.parametrize("recipe", ["approx-2bit", "approx-4bit"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_of_a_patched_model_gives_the_same_gradient(how: str, recipe: str) -> None:
    _, patched = pair(built(WithOwnActivation, frozen=True), recipe)
    if how == "deepcopy":
        other = copy.deepcopy(patched)
    else:
        file = io.BytesIO()
        torch.save(patched, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert torch.equal(gradients(patched, inputs()), gradients(other, inputs()))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_it_gives_the_stock_gradient(backend: str) -> None:
    torch._dynamo.reset()
    stock, patched = pair(built(frozen=True))
    run: Any = torch.compile(patched, backend=backend)
    assert is_exact(stock, patched, forward=lambda model, x: model(x) if model is stock else run(x))


def test_a_compiled_part_of_a_block_works_inside() -> None:
    torch._dynamo.reset()
    stock, patched = pair(built())
    for layer in patched.layers:
        layer.down.compile(backend="aot_eager")
    # From PyTorch 2.14 on, a compiled function saves a detached alias of its input: it counts as no reader.
    assert (is_approximate if APPLY is None else is_exact)(stock, patched)


@pytest.mark.parametrize("name", ["bert", "vit", "gpt2"])
def test_a_model_that_trains_altogether_has_the_stock_gradient(name: str) -> None:
    stock = factories.tiny_model(name).eval()
    patched, batch = memopt.patch(copy.deepcopy(stock), "approx-2bit"), factories.tiny_inputs(name)
    for model in (stock, patched):
        model(**batch).loss.backward()
    for one, other in zip(stock.parameters(), patched.parameters(), strict=True):
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("around", [nullcontext, torch.autograd.set_detect_anomaly])
def test_anomaly_detection_changes_nothing(around: Any) -> None:
    _, patched = pair(built(frozen=True))
    expected = gradients(patched, inputs())
    with around() if around is nullcontext else around(True):
        assert torch.equal(gradients(patched, inputs()), expected)
