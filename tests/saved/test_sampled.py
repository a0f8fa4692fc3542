"""A linear's input is kept as a sample of its rows where linears alone hold it, and whole everywhere else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memopt
from memopt.kernels.derivative_codes.schemes import FLAG_GROUP
from memopt.kernels.sampled_linear.sampling import rows_kept
from memopt.patches.sampled_linear.slot import _together
from memopt.trace.account import account, live_bytes
from tests.saved.codable import HIDDEN, WIDTH, Block, built

BATCH, TOKENS = 2, 20
ROWS = BATCH * TOKENS
KEPT = rows_kept(ROWS, 0.3)
FP32 = 4
#: An index and a weight for each row that is kept.
PER_ROW = 8


class ReLUBlock(Block):
    activation = nn.ReLU


def inputs() -> Tensor:
    return torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))


def pair(block: type[nn.Module], *changes: str, recipe: str = "sampled") -> tuple[nn.Module, nn.Module]:
    stock = built(block)
    rules = memopt.load_recipe(recipe, changes)
    return stock, memopt.patch(copy.deepcopy(stock), rules, inputs={"x": inputs()})


Gradients = dict[str, Tensor]


def gradients(
    model: nn.Module, forward: Callable[[nn.Module, Tensor], Tensor] | None = None, seed: int = 0
) -> Gradients:
    model.zero_grad()
    x = inputs().requires_grad_()
    torch.manual_seed(seed)
    y = model(x) if forward is None else forward(model, x)
    y.square().sum().backward()
    named = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return named | {"x": x.grad.clone()}


def estimated(one: Gradients, other: Gradients) -> set[str]:
    """Names of the gradients that differ by more than rounding, without the number of their layer."""
    assert list(one) == list(other)
    return {
        name.split(".", 2)[-1]
        for name in one
        if not torch.allclose(one[name], other[name], rtol=1e-4, atol=1e-5 * float(one[name].abs().max()))
    }


def kept(model: nn.Module) -> int:
    """Bytes that the second block keeps for backward; both ways of counting agree."""
    x = inputs().requires_grad_()

    def run() -> Any:
        return model(x)

    saved, short = account(model, run).saved, copy.deepcopy(model)
    del short.layers[1]
    assert saved == live_bytes(run)
    return saved - account(short, lambda: short(x)).saved


# --- what holds it ---------------------------------------------------------------------------------------------------


def test_an_activation_that_keeps_a_code_behind_a_sample() -> None:
    stock, patched = pair(Block, "activations.code=8bit")
    assert estimated(gradients(stock), gradients(patched)) >= {"down.weight"}
    code = ROWS * HIDDEN + -(-ROWS * HIDDEN // FLAG_GROUP)
    sample = KEPT * (HIDDEN * FP32 + PER_ROW)
    assert kept(patched) == code + sample + ROWS * WIDTH * FP32  # and the input of `up`, which is the residual's


def test_an_exact_activation_makes_the_input_again_for_nothing() -> None:
    stock, patched = pair(Block, "activations.code=none")
    assert not estimated(gradients(stock), gradients(patched))
    plan = memopt.plan_for(stock, memopt.load_recipe("sampled", ["activations.code=none"]), inputs={"x": inputs()})
    reasons = {entry.site: entry.reason for entry in plan.refusals if entry.kind == "linear"}
    assert reasons["layers.0.down.weight"].startswith("0 bytes: recomputed")


class TwoReaders(Block):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.up(x))
        return x + self.down(h) + self.other(h)


def test_readers_share_one_sample() -> None:
    stock, patched = pair(TwoReaders, "activations.code=8bit")
    assert estimated(gradients(stock), gradients(patched)) >= {"down.weight", "other.weight"}
    code = ROWS * HIDDEN + -(-ROWS * HIDDEN // FLAG_GROUP)
    assert kept(patched) == code + KEPT * (HIDDEN * FP32 + PER_ROW) + ROWS * WIDTH * FP32


def test_a_reader_that_is_left_alone_keeps_it_for_all() -> None:
    stock, patched = pair(TwoReaders, "ignore=[other]")
    assert not estimated(gradients(stock), gradients(patched))


class HandsItOut(Block):
    """Somebody keeps a reference, which no plan can know."""

    def __init__(self) -> None:
        super().__init__()
        self.mine: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.up(x))
        self.mine = [h]
        return x + self.down(h)


def test_exact_while_somebody_refers_to_it() -> None:
    stock, patched = pair(HandsItOut)
    assert not estimated(gradients(stock), gradients(patched))


class SavesIt(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.up(x))
        return x + self.down(h) + self.down(h * h)


def test_exact_where_another_operation_keeps_it() -> None:
    stock, patched = pair(SavesIt)
    assert not estimated(gradients(stock), gradients(patched))


class Changed(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x) * 1
        y = self.down(h)
        with torch.no_grad():
            h.mul_(2)
        return x + y


def test_a_change_in_place_after_it_is_found_out() -> None:
    _, patched = pair(Changed)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(patched)


class TwiceTheSame(Block):
    """As blocks that share their weights do."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(self.act(self.up(x)))
        return x + self.down(self.act(self.up(x)))


def test_a_module_that_runs_twice_keeps_a_sample_for_each() -> None:
    stock, patched = pair(TwiceTheSame)
    draws = torch.stack([gradients(patched, seed=seed)["layers.1.down.weight"] for seed in range(200)])
    exact, spread = gradients(stock)["layers.1.down.weight"], float(draws.std(0).norm())
    # The codes do not touch this gradient: it is right on average.
    assert float((draws.mean(0) - exact).norm()) < 3 * spread / 200**0.5
    assert spread > 0.05 * float(exact.norm())


def test_gradients_that_are_known_to_be_tiny_still_count() -> None:
    known = torch.tensor([1e-30, 2e-30, 0.0])

    together = _together([lambda: known, lambda: known])
    assert together is not None
    torch.testing.assert_close(together, known.double() * 2**0.5, rtol=1e-6, atol=0.0)
    assert _together([lambda: known, None]) is None


# --- ReLU ------------------------------------------------------------------------------------------------------------


class DropsOut(ReLUBlock):
    """Something stands between that nothing recomputes, so that the ReLU's output is its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)) + 2)


def mask_bytes() -> int:
    return ROWS * HIDDEN // 8 + -(-ROWS * HIDDEN // FLAG_GROUP)


def test_a_relu_keeps_a_bit_beside_a_sample() -> None:
    stock, patched = pair(ReLUBlock)
    assert estimated(gradients(stock), gradients(patched)) == {"down.weight"}
    assert kept(patched) == mask_bytes() + KEPT * (HIDDEN * FP32 + PER_ROW) + ROWS * WIDTH * FP32


def test_a_relu_and_an_exact_linear_share_the_output() -> None:
    stock, patched = pair(ReLUBlock, "activations.relu=mask", recipe="exact-unfolded")
    assert not estimated(gradients(stock), gradients(patched))
    assert kept(patched) == kept(stock)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_relu_nobody_reads_keeps_a_bit_and_stays_exact(frozen: bool) -> None:
    stock, patched = pair(ReLUBlock if frozen else DropsOut, "activations.relu=mask", recipe="exact-unfolded")
    for model in (stock, patched):
        for layer in model.layers:
            layer.down.weight.requires_grad_(not frozen)
    one, other = gradients(stock), gradients(patched)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert kept(stock) - kept(patched) == ROWS * HIDDEN * FP32 - mask_bytes()


def test_nan_goes_through_a_mask() -> None:
    stock, patched = pair(DropsOut, "activations.relu=mask", recipe="exact-unfolded")
    for model in (stock, patched):
        with torch.no_grad():
            model.layers[0].up.bias[3] = torch.nan
    assert all(bool(g.isnan().any()) for g in (gradients(stock)["x"], gradients(patched)["x"]))


# --- hooks of others -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_in_a_checkpointed_block_nothing_is_sampled(use_reentrant: bool) -> None:
    """Its inputs are recomputed, so a sample would free nothing."""

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        for layer in model.layers:
            x = checkpoint(layer, x, use_reentrant=use_reentrant)
        return x

    stock, patched = pair(ReLUBlock)
    assert not estimated(gradients(stock, forward), gradients(patched, forward))


def test_a_checkpointed_block_does_not_change_what_the_others_draw() -> None:
    def some(model: nn.Module, x: Tensor) -> Tensor:
        return model.layers[1](checkpoint(model.layers[0], x, use_reentrant=False))

    _, patched = pair(ReLUBlock)
    first, second = gradients(patched, some), gradients(patched, some)
    assert torch.equal(first["layers.1.down.weight"], second["layers.1.down.weight"])
    assert not torch.equal(first["layers.1.down.weight"], gradients(patched, some, seed=1)["layers.1.down.weight"])


def test_offloaded_tensors_are_left_alone() -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            y: Tensor = model(x)
        return y

    stock, patched = pair(ReLUBlock)
    assert not estimated(gradients(stock, forward), gradients(patched, forward))


def test_unpatched_it_is_exact_again() -> None:
    stock, patched = pair(ReLUBlock)
    memopt.unpatch(patched)
    one, other = gradients(stock), gradients(patched)
    assert all(torch.equal(one[name], other[name]) for name in one)
