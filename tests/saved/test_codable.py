"""An activation's input is kept exactly where somebody keeps its output, and as a code where nobody does."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memopt.kernels.derivative_codes.codes import apply_code, derivative_code, encode
from memopt.kernels.derivative_codes.function import CodableFunction
from memopt.patches.activation.module import save_as_code
from memopt.plan.recipe import load_recipe
from memopt.saved import RecomputeScope
from memopt.trace.account import account, live_bytes
from tests.saved.codable import (
    BATCH,
    BITS,
    ELEMENTS,
    HIDDEN,
    TOKENS,
    WIDTH,
    Block,
    built,
    bytes_of,
    freeze,
    inputs,
    is_approximate,
    is_exact,
    pair,
)


@pytest.mark.parametrize("recipe", BITS)
def test_where_the_next_linear_keeps_its_input_the_gradient_is_exact(recipe: str) -> None:
    assert is_exact(*pair(built(), recipe))


@pytest.mark.parametrize("recipe", BITS)
def test_where_the_next_linear_is_frozen_the_code_is_kept(recipe: str) -> None:
    stock, patched = pair(built(frozen=True), recipe)
    assert is_approximate(stock, patched) or recipe == "approx-8bit"
    assert not is_exact(stock, patched)
    x = inputs()
    saved = live_bytes(lambda: stock(x)) - live_bytes(lambda: patched(x))
    assert saved == 2 * (ELEMENTS * 4 - bytes_of(BITS[recipe]))  # two blocks


@pytest.mark.parametrize("recipe", BITS)
def test_the_gradient_is_what_the_code_says(recipe: str) -> None:
    model, x = built(frozen=True), inputs()
    _, patched = pair(copy.deepcopy(model), recipe)
    code = derivative_code("gelu_erf", load_recipe(recipe).activations.code)
    last = patched.layers[1]
    h = patched.layers[0](x).detach()
    (actual,) = torch.autograd.grad(last(h).sum(), [last.up.bias])
    with torch.no_grad():
        dh = torch.ones(BATCH, TOKENS, WIDTH) @ last.down.weight
        expected = apply_code(dh, encode(last.up(h), code), code).sum((0, 1))
    torch.testing.assert_close(actual, expected)


def test_the_forward_is_exact() -> None:
    stock, patched = pair(built(frozen=True))
    assert torch.equal(stock(inputs()), patched(inputs()))


def test_reports_count_what_is_left() -> None:
    _, patched = pair(built(frozen=True))
    x = inputs()
    counted = account(patched, lambda: patched(x))
    assert counted.total == live_bytes(lambda: patched(x))
    assert counted.unseen == 0


def test_it_is_decided_anew_at_each_call() -> None:
    stock, patched = pair(built())
    for frozen in (False, True, False, True):
        freeze(stock, frozen)
        freeze(patched, frozen)
        assert is_exact(stock, patched) == (not frozen)


def adapted_later(*targets: str) -> list[nn.Module]:
    """A frozen model and a patched one, with equal adapters."""
    adapters = peft.LoraConfig(r=2, target_modules=[*targets], init_lora_weights=False)
    results = []
    for each in pair(built().requires_grad_(False)):
        torch.manual_seed(1)
        results.append(peft.get_peft_model(each, adapters))
    return results


def test_an_adapter_that_is_added_later_makes_it_exact() -> None:
    assert is_exact(*adapted_later("up", "down"))


def test_an_adapter_before_the_activation_alone_leaves_the_code() -> None:
    assert is_approximate(*adapted_later("up"))


class TwoReaders(Block):
    """One of the two trains."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.up(x))
        return x + self.down(h) + self.other(h)


def test_one_reader_of_two_that_keeps_the_output_is_enough_to_be_exact() -> None:
    assert is_exact(*pair(built(TwoReaders, frozen=True)))


class KeepsItsInput(Block):
    """Something else keeps the activation's input: a code would be more, not less."""

    def forward(self, x: Tensor) -> Tensor:
        z = self.up(x)
        return x + self.down(self.act(z)) + z.sin().mean(-1, keepdim=True)


def test_an_input_that_is_kept_anyway_is_not_coded() -> None:
    assert is_exact(*pair(built(KeepsItsInput, frozen=True)))


class UsedTwice(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = x + self.down(self.act(self.up(x)))
        return y + self.down(self.act(self.up(2 * y)))


def test_one_module_that_is_called_twice_has_two_codes() -> None:
    stock, patched = pair(built(UsedTwice, frozen=True))
    assert is_approximate(stock, patched)
    x = inputs()
    saved = live_bytes(lambda: stock(x)) - live_bytes(lambda: patched(x))
    assert saved == 4 * (ELEMENTS * 4 - bytes_of(2))


def test_an_output_that_is_read_after_the_block_has_its_values() -> None:
    """Outside, sin keeps the output itself: its derivative is exact, that of the activation is the code's."""
    code, w = derivative_code("gelu_erf", "2bit"), inputs().requires_grad_()

    def activated(z: Tensor) -> Tensor | None:
        return save_as_code(lambda slot: CodableFunction.apply(z, F.gelu, code, slot), lambda kept: encode(kept, code))

    with RecomputeScope():
        h = activated(w * 2)
    assert h is not None
    dh, actual = torch.autograd.grad(h.sin().sum(), [h, w])
    assert torch.equal(dh, h.cos())
    torch.testing.assert_close(actual, 2 * apply_code(h.detach().cos(), encode(w.detach() * 2, code), code))


def test_two_modules_may_share_one_activation() -> None:
    model = built(frozen=True)
    model.layers[1].act = model.layers[0].act
    stock, patched = pair(model)
    assert is_approximate(stock, patched)
    freeze(stock, False)
    freeze(patched, False)
    assert is_exact(stock, patched)


class Activated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act = nn.Linear(WIDTH, WIDTH), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.act(self.up(x))
        return h


class HalvesApart(nn.Module):
    """The activation and its reader have no block around both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = Activated(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.first(x))
        return y


class AtTheRoot(Block):
    """No module but the root is around the activation."""


class EndsInActivations(nn.Module):
    """Each block's last operation is an activation, which the next linear reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Activated() for _ in range(3)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.head(x)
        return y


def test_a_block_that_ends_in_an_activation_is_read_by_the_next_one() -> None:
    torch.manual_seed(0)
    assert is_exact(*pair(EndsInActivations()))


@pytest.mark.parametrize("make", [HalvesApart, AtTheRoot])
def test_outside_of_blocks_an_output_that_is_kept_makes_it_exact(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    assert is_exact(*pair(make()))


class NormBefore(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act, self.down = nn.LayerNorm(WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.norm(x)))


@pytest.mark.parametrize("frozen", [False, True])
def test_an_input_that_can_be_recomputed_costs_nothing(frozen: bool) -> None:
    model, x = built(NormBefore, frozen=frozen), inputs()
    (_, exact), (stock, patched) = pair(copy.deepcopy(model), "exact-unfolded"), pair(model)
    assert live_bytes(lambda: patched(x)) <= live_bytes(lambda: exact(x))
    assert is_exact(stock, patched)


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act = nn.Conv1d(TOKENS, TOKENS, 1), nn.GELU()
        self.down = nn.Conv1d(TOKENS, TOKENS, 3, padding=1, padding_mode="reflect")

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.act(self.up(x)))
        return y


def test_a_reader_that_keeps_a_padded_copy_makes_it_exact() -> None:
    model, x = built(Padded), inputs()
    (_, exact), (stock, patched) = pair(copy.deepcopy(model), "exact-unfolded"), pair(model)
    assert is_exact(stock, patched)
    assert live_bytes(lambda: patched(x)) == live_bytes(lambda: exact(x))


class OnALeaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(x) * 2
        return y


def test_a_leaf_is_not_coded() -> None:
    stock, patched = pair(built(OnALeaf))
    assert is_exact(stock.layers[0], patched.layers[0])
