"""Sampled linears in the hands of code that does what the plan does not foresee: each of these once went wrong."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memopt
from memopt.patches.sampled_linear.module import patch_sampled_linear
from memopt.patches.sampled_linear.slot import Sampling
from memopt.patches.sampled_linear.visits import LinearCall
from memopt.sampling import remember_gradients
from memopt.saved.scope import RecomputeScope
from memopt.trace.account import account
from tests.saved.codable import HIDDEN, WIDTH, Block, Model
from tests.saved.test_sampled import BATCH, KEPT, PER_ROW, TOKENS, ReLUBlock, estimated, gradients, inputs, pair


def linears() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    stock = nn.Linear(WIDTH, HIDDEN)
    patched = copy.deepcopy(stock)
    patch_sampled_linear(patched, Sampling("systematic", 0.3))
    return stock, patched


# --- the input of the code, and tensors recomputed from it ----------------------------------------------------------


class KeptCopy(ReLUBlock):
    """The ReLU's output is sampled alone, but a dropped-out copy of it stays for somebody's sake."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.other = nn.Dropout(0.5), nn.Linear(HIDDEN, WIDTH)
        self.mine: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.up(x))
        d = self.drop(h)
        self.mine = [d]
        return x + self.down(h) + self.other(d)


def test_a_relu_does_not_keep_a_mask_where_a_copy_of_its_output_is_recomputed() -> None:
    """Its other reader would take a sample, but the copy of somebody else's is made from what the ReLU keeps."""
    stock, patched = pair(KeptCopy)
    exact = memopt.load_recipe("exact-unfolded", ["dropouts.method=seed"])
    assert not estimated(
        gradients(memopt.patch(stock, exact, inputs={"x": inputs()})),
        gradients(patched),
    )


class KeptOutput(Block):
    """The GELU's input is sampled alone, but its output stays for somebody's sake."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(HIDDEN, WIDTH)
        self.mine: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        z = self.up(x)
        h = self.act(z)
        self.mine = [h]
        return x + self.down(h) + self.other(z)


def test_an_activation_does_not_keep_a_code_where_its_output_is_recomputed() -> None:
    stock, patched = pair(KeptOutput)
    assert not estimated(gradients(stock), gradients(patched))


# --- the output ------------------------------------------------------------------------------------------------------

IN_PLACE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "residual": lambda y, x: y.add_(x),
    "activation": lambda y, x: torch.relu_(y),
    "assignment": lambda y, x: y[:, 0].zero_(),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("change", IN_PLACE.values(), ids=IN_PLACE.keys())
def test_its_output_may_be_changed_in_place(change: Callable[[Tensor, Tensor], Any], bias: bool) -> None:
    class Changed(ReLUBlock):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Linear(HIDDEN, WIDTH, bias=bias)

        def forward(self, x: Tensor) -> Tensor:
            y = self.down(self.act(self.up(x)))
            change(y, x)
            return y + x

    stock, patched = pair(Changed)
    assert estimated(gradients(stock), gradients(patched)) == {"down.weight"}


# --- the input -------------------------------------------------------------------------------------------------------

TIMES = 64


class Expanded(Block):
    """The storage of what `down` reads is smaller than a sample of its rows."""

    def forward(self, x: Tensor) -> Tensor:
        few = torch.sin(self.up(x[:, :1]))
        return x + self.down(few.expand(-1, TIMES, -1)).mean(1, keepdim=True)


def test_a_sample_is_not_taken_where_the_storage_is_smaller() -> None:
    stock, patched = pair(Expanded)
    assert not estimated(gradients(stock), gradients(patched))


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_inputs_are_for_the_stock_module(layout: torch.layout) -> None:
    def gradient(module: nn.Module) -> Tensor:
        parts = [torch.ones(n, WIDTH, requires_grad=True) for n in (5, 9)]
        with RecomputeScope():
            y = module(torch.nested.as_nested_tensor(parts, layout=layout) * 2)
        padded = torch.nested.to_padded_tensor(y, 0.0)
        padded.sum().backward()
        assert module.weight.grad is not None
        return module.weight.grad

    stock, patched = linears()
    assert torch.equal(gradient(patched), gradient(stock))


def test_a_weight_may_be_changed_where_its_input_has_no_gradient() -> None:
    """The stock module keeps the input alone then: a step of the optimizer may lie between forward and backward."""
    stock, patched = linears()
    for module in (stock, patched):
        with RecomputeScope():
            y = module(inputs())
        with torch.no_grad():
            module.weight.add_(1)
        y.square().sum().backward()
    assert torch.equal(patched.weight.grad, stock.weight.grad)


# --- autocast --------------------------------------------------------------------------------------------------------


def test_autocast_leaves_fp64_alone() -> None:
    def gradients_of(module: nn.Module) -> list[Tensor]:
        x = inputs().double().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16), RecomputeScope():
            h = x * 1
            y = module(h)
        assert y.dtype == torch.float64
        y.square().sum().backward()
        return [x.grad, module.weight.grad, module.bias.grad]

    stock, patched = (gradients_of(module.double()) for module in linears())
    assert all(torch.equal(one, other) for one, other in zip(stock, patched, strict=True))


def test_under_autocast_rows_are_kept_as_they_are_used() -> None:
    """T5 casts to the dtype of its weights, which is fp32 then, and autocast casts back."""
    _, patched = linears()
    x = inputs().requires_grad_()

    def run() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16), RecomputeScope():
            y: Tensor = patched(x * 1)
        return y

    assert account(patched, run).saved == KEPT * (WIDTH * torch.bfloat16.itemsize + PER_ROW)


def test_casts_of_autocast_are_not_left_for_the_next_who_reads_the_weight() -> None:
    """One that is made inside of an autograd function has no graph in older PyTorch (its issue 158232), and autocast
    would give it to everybody in the region."""
    _, patched = linears()
    x = inputs().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16), RecomputeScope():
        patched(x * 1)
        with _Casts() as casts:
            F.linear(x, patched.weight, patched.bias)
    assert casts.count == 3


class _Casts(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts casts."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


# --- unchanged -------------------------------------------------------------------------------------------------------


class Masked(Model):
    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return super().forward(x)


def test_a_loss_that_is_kept_holds_no_call_of_a_sampled_linear() -> None:
    model = memopt.patch(Masked(ReLUBlock), "sampled", inputs={"x": inputs()})
    remember_gradients(model, BATCH, TOKENS)
    mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
    mask[:, TOKENS // 2 :] = 0
    losses = []
    for _ in range(3):
        loss = model(inputs().requires_grad_(), attention_mask=mask, memopt_index=torch.arange(BATCH)).sum()
        loss.backward()
        losses.append(loss)
    assert not any(type(each) is LinearCall for each in gc.get_objects())
    assert len(losses) == 3
