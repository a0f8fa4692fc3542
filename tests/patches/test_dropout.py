"""Which modules are dropouts of single elements, and what they do once a seed is all that they keep."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from memopt.kernels.base.counter import draw_seed
from memopt.kernels.dropout.function import seeded_dropout
from memopt.patches.dropout import module as dropout
from memopt.patches.dropout.module import DropoutRewrite, patch_dropout
from memopt.patches.swap import is_swapped, swap_state, unswap
from memopt.trace.account import live_bytes

P = 0.3


class Dropping(nn.Module):
    """A dropout as somebody might write it."""

    def __init__(self, p: float = P) -> None:
        super().__init__()
        self.drop_prob = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.drop_prob == 0:
            return x
        return self.factors(x) * x

    def factors(self, x: Tensor) -> Tensor:
        return torch.empty_like(x).bernoulli_(1 - self.drop_prob) / (1 - self.drop_prob)


class ByFunction(Dropping):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.drop_prob, self.training)


class OfPaths(Dropping):
    def factors(self, x: Tensor) -> Tensor:
        return super().factors(x.new_empty(x.shape[0], *(1,) * (x.dim() - 1)))


class OfColumns(Dropping):
    def factors(self, x: Tensor) -> Tensor:
        return super().factors(x[..., :1])


class OfPairsOfRows(Dropping):
    def factors(self, x: Tensor) -> Tensor:
        return super().factors(x[::2]).repeat_interleave(2, 0)


class OfPairs(Dropping):
    def factors(self, x: Tensor) -> Tensor:
        return super().factors(x[..., ::2]).repeat_interleave(2, -1)


class Unscaled(Dropping):
    def factors(self, x: Tensor) -> Tensor:
        return super().factors(x) * (1 - self.drop_prob)


class OfTheKept(Dropping):
    def factors(self, x: Tensor) -> Tensor:
        return super().factors(x) * (1 - self.drop_prob) / self.drop_prob


class AlwaysOn(Dropping):
    def forward(self, x: Tensor) -> Tensor:
        return self.factors(x) * x


class WithoutNaN(Dropping):
    def forward(self, x: Tensor) -> Tensor:
        return x.masked_fill(self.factors(x) == 0, 0) / (1 - self.drop_prob) if self.training and self.drop_prob else x


class OfTheSmallest(Dropping):
    def factors(self, x: Tensor) -> Tensor:
        flat = x.detach().flatten()
        kept = flat >= flat.quantile(self.drop_prob)
        return kept.view_as(x) / (1 - self.drop_prob)


class TheSameAtEveryCall(Dropping):
    def factors(self, x: Tensor) -> Tensor:
        u = torch.rand(x.shape, generator=torch.Generator().manual_seed(0))
        return (u >= self.drop_prob).to(x.dtype) / (1 - self.drop_prob)


class FromAnotherGenerator(Dropping):
    def factors(self, x: Tensor) -> Tensor:
        u = torch.tensor([random.random() for _ in range(x.numel())]).view_as(x)
        return (u >= self.drop_prob).to(x.dtype) / (1 - self.drop_prob)


class StraightThrough(Dropping):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return x + (y - x).detach()


class InFP32(Dropping):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float() if x.dtype == torch.bfloat16 else x)


class Fixed(Dropping):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training)


class WithMemory(Dropping):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))


class Noise(Dropping):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop_prob * torch.randn_like(x)


ELEMENTWISE = [nn.Dropout(P), nn.Dropout(0.0), Dropping(), ByFunction()]
OTHERS = [
    nn.Dropout1d(P), nn.Dropout2d(P), nn.Dropout3d(P), nn.AlphaDropout(P), nn.FeatureAlphaDropout(P),
    nn.Dropout(P, inplace=True), nn.AlphaDropout(P, inplace=True), nn.Identity(), nn.ReLU(), nn.LeakyReLU(P),
    nn.RReLU(0.1, 0.3), nn.Linear(4, 4), nn.LayerNorm(4), nn.Sequential(nn.Dropout(P)), nn.Threshold(0.5, 0.0),
    OfPaths(), OfColumns(), OfPairs(), OfPairsOfRows(), Unscaled(), OfTheKept(), AlwaysOn(), WithoutNaN(),
    OfTheSmallest(), TheSameAtEveryCall(), FromAnotherGenerator(), StraightThrough(), InFP32(), Fixed(), WithMemory(),
    Noise(),
]  # fmt: skip


def named(module: nn.Module) -> str:
    return f"{type(module).__name__}{'-in-place' if getattr(module, 'inplace', False) else ''}"


def patched(p: float = P) -> nn.Dropout:
    module = nn.Dropout(p)
    patch_dropout(module)
    return module


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def seeded(p: float, x: Tensor) -> Tensor:
    """What a patched dropout gives from the present state of the generator, which stays."""
    with torch.random.fork_rng(devices=[]):
        return seeded_dropout(x, p, draw_seed())


@pytest.mark.parametrize("module", ELEMENTWISE, ids=named)
def test_a_dropout_of_elements_is_recognised_by_its_values(module: nn.Module) -> None:
    module, x = copy.deepcopy(module), draw(4, 50)
    patch_dropout(module)
    state = swap_state(module)
    assert isinstance(state, DropoutRewrite)
    setattr(module, state.probability, 0.4)
    torch.manual_seed(1)
    expected = seeded(0.4, x)
    assert torch.equal(module(x), expected)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("module", OTHERS, ids=named)
def test_anything_else_is_refused_with_a_reason(module: nn.Module, training: bool) -> None:
    before = dict(vars(module))
    with pytest.raises(ValueError, match=r"^it |^what it|^its |^no attribute"):
        patch_dropout(module.train(training))
    assert not is_swapped(module)
    assert vars(module) | {"training": before["training"]} == before


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.Dropout2d(P), "each element on its own"),
        (OfPaths(), "each element on its own"),
        (nn.AlphaDropout(P), "not 0"),
        (nn.Dropout(P, inplace=True), "writes into its input"),
        (TheSameAtEveryCall(), "the same at every call"),
        (StraightThrough(), "gradient"),
        (AlwaysOn(), "although it is off"),
        (InFP32(), "another dtype"),
        (nn.Identity(), "no attribute"),
        (nn.Sequential(nn.Dropout(P)), "children"),
        (WithMemory(), "tensors of its own"),
    ],
    ids=lambda value: named(value) if isinstance(value, nn.Module) else None,
)
def test_the_reason_says_what_is_in_the_way(module: nn.Module, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        patch_dropout(module)


def test_the_proof_leaves_the_generator_as_it_was() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    patched()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_default_device_without_memory_does_not_matter() -> None:
    with torch.device("meta"):
        module = patched()
    assert is_swapped(module)


def test_p_is_read_at_every_call() -> None:
    module, x = patched(), draw(40, 50)
    for p in (0.1, 0.9, 1.0, 1):
        module.p = p
        torch.manual_seed(0)
        expected = seeded(p, x)
        assert torch.equal(module(x), expected)
    module.p = 1.5
    with pytest.raises(ValueError, match="between 0 and 1"):
        module(x)


@pytest.mark.parametrize("case", ["eval", "p is 0"])
def test_where_nothing_is_dropped_nothing_is_drawn_and_the_input_comes_back(case: str) -> None:
    module, x = patched(0.0 if case == "p is 0" else P), draw(4, 5).requires_grad_()
    module.train(case != "eval")
    before = torch.random.get_rng_state()
    assert module(x) is x
    assert torch.equal(torch.random.get_rng_state(), before)


def test_manual_seed_repeats_a_run_and_every_call_draws_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    def recorded() -> int:
        seeds.append(draw_seed())
        return seeds[-1]

    monkeypatch.setattr(dropout, "draw_seed", recorded)
    module, x = patched(), draw(4, 5).requires_grad_()
    runs = []
    for _ in range(2):
        torch.manual_seed(7)
        y = [module(x) for _ in range(3)]
        torch.stack(y).sum().backward()
        runs.append(torch.stack(y))
    assert torch.equal(*runs)
    assert len(seeds) == 6
    assert len(set(seeds)) == 3


def test_nothing_is_kept_for_backward() -> None:
    x = draw(64, 64).requires_grad_()

    def run(module: nn.Module) -> Callable[[], Tensor]:
        return lambda: module(x * 2).sum()

    assert live_bytes(run(nn.Dropout(P))) == 64 * 64 * 4
    assert live_bytes(run(patched())) == 0


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.second, self.again = nn.Linear(8, 16), nn.Dropout(P), nn.Linear(16, 8), Dropping()

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.second(self.drop(self.first(x).sin())))


def branch() -> Branch:
    torch.manual_seed(0)
    module = Branch()
    patch_dropout(module.drop)
    patch_dropout(module.again)
    return module


def gradients(module: nn.Module, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    module.zero_grad()
    x = draw(5, 8).requires_grad_()
    torch.manual_seed(3)
    y = run(x)
    torch.manual_seed(99)  # what is drawn after the forward must not matter
    y.square().sum().backward()
    return [y.detach(), x.grad, *(parameter.grad.clone() for parameter in module.parameters())]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_draws_the_same_mask_in_its_second_run(use_reentrant: bool) -> None:
    module = branch()
    expected = gradients(module, module)
    actual = gradients(module, lambda x: checkpoint(module, x, use_reentrant=use_reentrant))
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))


def test_two_checkpoints_draw_as_two_calls_do() -> None:
    module = branch()
    expected = gradients(module, lambda x: module(module(x)))
    twice = gradients(
        module, lambda x: checkpoint(module, checkpoint(module, x, use_reentrant=True), use_reentrant=True)
    )
    assert all(torch.equal(a, b) for a, b in zip(expected, twice, strict=True))


def test_the_mask_does_not_depend_on_whether_gradients_are_recorded() -> None:
    module, x = patched(), draw(4, 5)
    results = []
    for requires_grad, recorded in ((True, True), (False, True), (False, False)):
        torch.manual_seed(1)
        with torch.set_grad_enabled(recorded):
            results.append(module(x.clone().requires_grad_(requires_grad)).detach())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def runs_stock(run: Callable[[nn.Module], Any]) -> bool:
    results = []
    for module in (nn.Dropout(P), patched()):
        torch.manual_seed(2)
        results.append(run(module))
    return torch.equal(*results)


def test_it_steps_aside_where_something_else_records() -> None:
    x = draw(40, 5)
    assert runs_stock(lambda module: torch.compile(module, backend="eager", fullgraph=True)(x))
    assert runs_stock(lambda module: torch.func.grad(lambda t: module(t).sum())(x))
    assert runs_stock(lambda module: torch.func.vmap(module, randomness="different")(x))
    assert runs_stock(lambda module: torch.func.jvp(module, (x,), (x,))[1])
    assert not runs_stock(lambda module: module(x))


def test_tensors_that_are_no_plain_ones_get_the_stock_forward() -> None:
    class Sub(Tensor):
        pass

    assert runs_stock(lambda module: module(draw(40, 5).as_subclass(Sub)).as_subclass(Tensor))
    rows = torch.nested.nested_tensor([draw(40), draw(30)])
    assert runs_stock(lambda module: module(rows).to_padded_tensor(0.0))
    assert not runs_stock(lambda module: module(nn.Parameter(draw(40, 5))).detach())


def test_more_than_one_argument_is_the_stock_forwards_affair() -> None:
    with pytest.raises(TypeError):
        patched()(draw(3), draw(3))
    torch.manual_seed(0)
    expected = seeded(P, draw(30))
    assert torch.equal(patched()(input=draw(30)), expected)


def test_one_that_is_switched_to_in_place_later_runs_as_stock() -> None:
    module, x = patched(), draw(4, 5)
    module.inplace = True
    assert module(x) is x


def test_where_tensors_have_no_memory_a_forward_gives_their_shape() -> None:
    module = patched()
    with FakeTensorMode():
        y = module(torch.empty(3, 5, requires_grad=True))
    assert y.shape == (3, 5)
    assert y.grad_fn.name() == "SeededDropoutFunctionBackward"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_is_patched_as_well(copied: Callable[[nn.Module], nn.Module]) -> None:
    twin, x = copied(patched()), draw(4, 5)
    assert is_swapped(twin)
    torch.manual_seed(4)
    expected = seeded(P, x)
    assert torch.equal(twin(x), expected)


def test_unpatching_gives_the_stock_forward_back() -> None:
    module = patched()
    assert isinstance(module, nn.Dropout)
    assert repr(module) == repr(nn.Dropout(P))
    unswap(module)
    assert type(module) is nn.Dropout
    assert not is_swapped(module)


def test_patching_twice_is_an_error() -> None:
    with pytest.raises(ValueError, match="already patched"):
        patch_dropout(patched())


def test_hooks_on_it_run_once() -> None:
    module, seen = patched(), []
    module.register_forward_hook(lambda *_: seen.append("forward"))
    module.register_full_backward_hook(lambda *_: seen.append("backward"))
    module(draw(4).requires_grad_()).sum().backward()
    assert seen == ["forward", "backward"]


@pytest.mark.parametrize("seed", range(24))
def test_one_that_is_shared_changed_and_checkpointed_has_one_mask_for_each_call(seed: int) -> None:
    pick = random.Random(seed)
    p, mode, dtype = pick.choice([0.1, 0.5, 0.9]), seed % 3, pick.choice([torch.float64, torch.float32, torch.float16])
    module, x = nn.Dropout(p), (torch.rand(7, 33, generator=torch.Generator().manual_seed(seed)) + 1).to(dtype)
    patch_dropout(module)
    x = (x.t() if pick.random() < 0.5 else x).requires_grad_()
    seen: list[Tensor] = []

    def run(x: Tensor) -> Tensor:
        seen.extend(module(x * 1) for _ in range(2))
        return seen[-2] + 3 * seen[-1]

    torch.manual_seed(seed)
    y = run(x) if mode == 0 else checkpoint(run, x, use_reentrant=mode == 1)
    after = torch.rand(1)
    module.train(pick.random() < 0.5 or mode > 0)  # a flip between forward and backward
    first, second = ((each.detach() != 0).to(dtype) for each in seen[:2])
    assert not torch.equal(first, second)
    y.backward(torch.ones_like(y), retain_graph=mode == 0)
    scale = torch.ones((), dtype=dtype).div_(1 - p)
    assert torch.equal(x.grad, first * scale + second * scale * 3)
    torch.manual_seed(seed)
    module.train()
    assert torch.equal(run(x), y.detach())
    assert torch.equal(torch.rand(1), after)
