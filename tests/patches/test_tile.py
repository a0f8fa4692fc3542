"""Modules that run by tiles of tokens inside checkpointed blocks."""

from __future__ import annotations

import copy
import functools
import pickle
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import memopt
from memopt.patches.swap import is_swapped, swap_state
from memopt.patches.tile import module as tiles
from memopt.patches.tile.module import TileRewrite, patch_tiles
from memopt.patches.tile.probe import numbers_by_row
from memopt.plan.recipe import load_recipe
from memopt.trace.timeline import record
from memopt.trace.trace import activations
from tests.factories import tiny_inputs, tiny_model
from tests.support.compare import step_gradients

NAMES = ("llama", "gpt2", "t5", "vit", "gemma2", "mixtral")
gradients = functools.partial(step_gradients, seed=0)
#: Norms, scores or losses of these are in fp32.
LIMIT = {"t5": 1e-6, "llama": 1e-6, "gpt2": 1e-6, "gemma2": 1e-6, "mixtral": 1e-6}


@pytest.fixture
def differentiated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Tiles of five tokens. The number of tiles of each call that ran in backward."""
    counted: list[int] = []
    found = tiles._gradients

    def counting(ctx: Any, again: Any, x: Tensor, *more: Any) -> Any:
        counted.append(-(-x[..., 0].numel() // again.size))
        return found(ctx, again, x, *more)

    monkeypatch.setattr(tiles, "_STEP", 5)
    monkeypatch.setattr(tiles, "_COPIES", 1 << 30)  # as few tokens as there may be
    monkeypatch.setattr(tiles, "_gradients", counting)
    return counted


def model_of(name: str, **settings: Any) -> nn.Module:
    model = tiny_model(name, torch.float64, **settings).train()
    if name == "mixtral":  # grouped products on the CPU know no fp64
        model.set_experts_implementation("eager")
    return model


def patched(model: nn.Module, *settings: str, tiled: bool = True) -> nn.Module:
    method = f"tiles.method={'tokens' if tiled else 'none'}"
    recipe = load_recipe("exact-unfolded", ["checkpointing.method=full", method, *settings])
    return memopt.patch(copy.deepcopy(model), recipe)


def worst(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    least = 1e-6 * max(each.norm() for each in theirs.values())
    return max(float((ours[name] - each).norm() / each.norm().clamp(min=least)) for name, each in theirs.items())


@pytest.mark.parametrize("settings", [[], ["checkpointing.offload=input", "checkpointing.keep=attention"]])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_the_stock_models(name, settings, differentiated):
    model, inputs = model_of(name), tiny_inputs(name)
    ours = patched(model, *settings)
    assert worst(gradients(ours, inputs), gradients(model, inputs)) <= LIMIT.get(name, 1e-12)
    sites = [each for each in memopt.summary(ours).plan.entries if each.kind == "tile"]
    assert len(differentiated) == len(sites) > 0
    assert min(differentiated) > 1


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_the_models_own_switch_will_do(name, use_reentrant, differentiated):
    model, inputs = model_of(name), tiny_inputs(name)
    ours = patched(model, "checkpointing.method=none")
    for each in (ours, model):
        each.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        each.enable_input_require_grads()
    assert worst(gradients(ours, inputs), gradients(model, inputs)) <= LIMIT[name]
    assert differentiated


def test_blocks_that_are_not_checkpointed_run_whole(differentiated):
    model, inputs = model_of("llama"), tiny_inputs("llama")
    expected = gradients(patched(model, "checkpointing.method=none", tiled=False), inputs)
    ours = gradients(patched(model, "checkpointing.method=none"), inputs)
    assert all(torch.equal(ours[name], expected[name]) for name in expected)
    assert not differentiated


class MLP(nn.Module):
    """A feed-forward layer, with what a test wants `between`."""

    def __init__(self, between: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.between = between or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(F.gelu(self.up(x))))


def tiled(module: nn.Module) -> nn.Module:
    patch_tiles(module, 40, 1)
    return module


def step(module: nn.Module, x: Tensor, times: int = 1, dy: Tensor | None = None) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = checkpoint(module, x, use_reentrant=False)
    dy = torch.linspace(-1, 1, y.numel()).view_as(y) if dy is None else dy
    for left in reversed(range(times)):
        (y * dy.to(y.dtype)).sum().backward(retain_graph=left > 0)
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


X = torch.linspace(-1, 1, 2 * 13 * 8, dtype=torch.float64).view(2, 13, 8).sin()


def assert_equal(ours: list[Tensor], theirs: list[Tensor], rtol: float = 1e-12) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=rtol)


def test_a_dropout_drops_the_same_in_forward_and_backward(differentiated):
    """Ones in, ones out but for the dropout: the gradient is a multiple of what went through."""
    module = tiled(nn.Sequential(nn.Linear(8, 32, bias=False), nn.Dropout(0.5), nn.Linear(32, 8, bias=False)))
    module = module.double()
    torch.manual_seed(3)
    x = X.clone().requires_grad_()
    y = checkpoint(module, x, use_reentrant=False)
    before = torch.get_rng_state()
    y.sum().backward()  # y is linear in x: <dx, x> is its sum
    assert torch.allclose((x.grad * X).sum(), y.sum(), rtol=1e-10)
    assert torch.equal(torch.get_rng_state(), before)
    assert differentiated


def test_a_retained_graph_adds_up(differentiated):
    assert_equal(step(tiled(MLP().double()), X, 2), step(MLP().double(), X, 2))
    assert len(differentiated) == 2


def test_weights_of_16_bits_are_summed_up_in_fp32(differentiated):
    """A sum over tiles in bf16 would be off by a rounding of each.

    Those of single tiles, whose gradients are random, add up to that of the sum: sqrt(2) times the error of stock.
    """
    x, dy = torch.randn(2, 1, 2000, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact, whole, ours = (step(m, x.to(m.up.weight.dtype), dy=dy) for m in (
        MLP().bfloat16().double(), MLP().bfloat16(), tiled(MLP().bfloat16())
    ))  # fmt: skip
    assert differentiated == [400]
    for ideal, stock, mine in zip(exact[2:], whole[2:], ours[2:], strict=True):
        error = [float((each.double() - ideal).norm() / ideal.norm()) for each in (stock, mine)]
        assert error[1] <= 1.5 * error[0]


def test_autocast_is_that_of_the_forward(differentiated):
    stock, ours = MLP(), tiled(MLP())
    x = X.float()
    results = []
    for module in (stock, ours):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = checkpoint(module, leaf, use_reentrant=False)
        assert y.dtype == torch.bfloat16
        y.float().square().sum().backward()
        results.append([y.detach(), leaf.grad, *(p.grad for p in module.parameters())])
    assert_equal(results[1], results[0], 2e-2)
    assert differentiated


def test_tiles_that_run_again_are_cast_as_in_the_forward(differentiated):
    dtypes = []

    class Noted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            dtypes.append(x.dtype)
            return x

    with torch.autocast("cpu", torch.bfloat16):
        y = checkpoint(tiled(MLP(Noted())), X.float().requires_grad_(), use_reentrant=False)
    y.float().sum().backward()
    assert set(dtypes) == {torch.bfloat16}
    assert len(dtypes) == 2 * 6


def test_a_call_with_another_tensor_runs_whole(differentiated):
    class Scaled(MLP):
        def forward(self, x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
            return super().forward(x) * scale

    for scale, count in ((torch.full((2, 13, 1), 2.0, dtype=torch.float64), 0), (2.0, 1)):
        results = []
        for module in (Scaled().double(), tiled(Scaled().double())):
            x = X.clone().requires_grad_()
            checkpoint(module, x, scale, use_reentrant=False).square().sum().backward()
            results.append([x.grad, *(p.grad for p in module.parameters())])
        assert_equal(results[1], results[0])
        assert len(differentiated) == count


@pytest.mark.parametrize("frozen", [("up", "down"), ("down",)])
def test_frozen_parts_get_no_gradient(frozen, differentiated):
    modules = []
    for module in (MLP().double(), tiled(MLP().double())):
        for name in frozen:
            module.get_submodule(name).requires_grad_(False)
        modules.append(module)
    assert_equal(step(modules[1], X), step(modules[0], X))
    assert differentiated


def test_an_input_without_a_gradient_is_enough(differentiated):
    results = []
    for module in (MLP().double(), tiled(MLP().double())):
        checkpoint(module, X, use_reentrant=False).square().sum().backward()
        results.append([p.grad for p in module.parameters()])
    assert_equal(results[1], results[0])
    assert differentiated


def test_weights_that_changed_before_backward_are_an_error(differentiated):
    module = tiled(MLP().double())
    y = checkpoint(module, X.clone().requires_grad_(), use_reentrant=False)
    with torch.no_grad():
        module.up.weight.mul_(2)
    with pytest.raises(RuntimeError, match="by tiles of tokens"):
        y.sum().backward()


@pytest.mark.parametrize("computed", [False, True])
def test_lent_weights_are_lent_again(differentiated, computed):
    weights = {name: p.detach() * 1.5 for name, p in MLP().double().named_parameters()}
    results = []
    for module in (MLP().double(), tiled(MLP().double())):
        leaves = {name: each.clone().requires_grad_() for name, each in weights.items()}
        # Weights after an inner step of meta-learning are results of operations.
        lent = {name: each - 0.1 * each.detach() for name, each in leaves.items()} if computed else leaves
        x = X.clone().requires_grad_()

        def run(x: Tensor, module: nn.Module = module, lent: dict[str, Tensor] = lent) -> Tensor:
            return torch.func.functional_call(module, lent, (x,))

        checkpoint(run, x, use_reentrant=False).square().sum().backward()
        results.append([x.grad, *(each.grad for each in leaves.values())])
    assert_equal(results[1], results[0])
    assert differentiated


def test_each_parameter_gets_one_gradient(differentiated):
    module, seen = tiled(MLP().double()), []
    for name, parameter in module.named_parameters():
        parameter.register_hook(lambda gradient, name=name: seen.append(name))
    step(module, X)
    assert sorted(seen) == sorted(name for name, _ in module.named_parameters())


def test_a_hook_of_a_parameter_changes_its_gradient_once(differentiated):
    results = []
    for module in (MLP().double(), tiled(MLP().double())):
        for parameter in module.parameters():
            parameter.register_hook(lambda gradient: gradient * 3)
        results.append(step(module, X))
    assert_equal(results[1], results[0])
    assert differentiated


def test_a_view_with_a_gradient_that_is_no_parameter_keeps_the_module_whole(differentiated):
    """As sharding tools put them in the place of parameters."""
    module = tiled(MLP().double())
    flat = module.up.weight.detach().clone().requires_grad_()
    del module.up._parameters["weight"]
    module.up.weight = flat.view(32, 8)
    step(module, X)
    assert flat.grad is not None
    assert not differentiated


def test_hooks_inside_see_whole_calls(differentiated):
    module, seen = tiled(MLP().double()), []
    module.up.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    step(module, X)
    assert set(seen) == {torch.Size([2, 13, 32])}
    assert not differentiated


def test_a_second_derivative_is_refused(differentiated):
    y = checkpoint(tiled(MLP().double()), X.clone().requires_grad_(), use_reentrant=False)
    with pytest.raises(RuntimeError, match="second derivative"):
        y.square().sum().backward(create_graph=True)


def test_batched_gradients_are_those_of_the_whole(differentiated):
    jacobians = []
    for module in (MLP().double(), tiled(MLP().double())):
        x = X.clone().requires_grad_()
        y = module(x) if module is not None and not is_swapped(module) else checkpoint(module, x, use_reentrant=False)
        rows = torch.eye(y.numel(), dtype=y.dtype)[:3].view(3, *y.shape)
        jacobians.append(torch.autograd.grad(y, x, rows, is_grads_batched=True)[0])
    assert torch.allclose(*jacobians)


def test_a_block_that_ends_in_tiles_runs_them_once_more_only(differentiated):
    """Forward, and once in backward: the second run of the block stops where the input is saved."""
    calls = []

    class Noted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(len(x[0]))
            return x

    step(tiled(MLP(Noted()).double()), X)
    assert len(calls) == 2 * 6


@pytest.mark.rotates(3)
def test_the_transient_of_a_block_does_not_grow_with_its_width(differentiated):
    tokens = 4000

    def peak(width: int, tiles: bool) -> int:
        """Of activations, in numbers for each token."""
        module = nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 8)).double()
        x = torch.randn(1, tokens, 8, dtype=torch.float64, requires_grad=True)
        run = checkpoint_of(tiled(module) if tiles else module, x)
        return activations(record(module, run)).peak.nbytes // (8 * tokens)

    def checkpoint_of(module: nn.Module, x: Tensor) -> Any:
        return lambda: {"loss": checkpoint(module, x, use_reentrant=False).square().sum()}

    assert peak(32, tiles=False) > 3 * 32
    assert peak(256, tiles=True) <= peak(32, tiles=True) + 1 < 5 * 8


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_run_by_tiles_too(copied, differentiated):
    model, inputs = model_of("llama"), tiny_inputs("llama")
    ours = copied(patched(model))
    assert worst(gradients(ours, inputs), gradients(model, inputs)) <= LIMIT["llama"]
    assert differentiated
    memopt.unpatch(ours)
    assert not any(map(is_swapped, ours.modules()))


def test_what_another_patch_made_of_the_module_is_undone_too():
    ours = patched(model_of("llama"))
    states = [swap_state(m) for m in ours.modules() if is_swapped(m) and isinstance(swap_state(m), TileRewrite)]
    assert states
    assert all(state.layer is not None and state.reads == ("down_proj",) for state in states)
    stock = model_of("llama")
    memopt.unpatch(ours)
    assert [type(m) for m in ours.modules()] == [type(m) for m in stock.modules()]


# --- what is no site --------------------------------------------------------------------------------------------------


class Mixes(MLP):
    """Mixes tokens, in one of many ways."""

    def __init__(self, how: Any) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.how(self, x)


WAYS = {
    "mean": lambda m, x: x.mean(1, keepdim=True),
    "shift": lambda m, x: F.pad(x, (0, 0, 1, 0))[:, :-1],
    "attention": lambda m, x: F.scaled_dot_product_attention(x, x, x),
    "attention without a scale": lambda m, x: F.scaled_dot_product_attention(8 * x, 8 * x, x, scale=1.0),
    "position": lambda m, x: torch.arange(x.size(1), dtype=x.dtype)[None, :, None] * x,
    "batch": lambda m, x: x - x.mean((0, 1)),
    "capacity": lambda m, x: torch.where((torch.arange(x.size(1)) < 64)[None, :, None], x, 0 * x),
    "train": lambda m, x: x.mean(1, keepdim=True) if m.training else x,
    "noise": lambda m, x: torch.randn_like(x),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_module_that_mixes_tokens_is_no_site(way):
    assert numbers_by_row(Mixes(lambda m, x: x), 8) == 40
    assert numbers_by_row(Mixes(WAYS[way]), 8) == 0


def test_a_module_that_computes_little_is_no_site():
    assert numbers_by_row(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), 8) == 0
    assert numbers_by_row(MLP(nn.Dropout(0.5)), 8) == 40


def test_a_module_that_is_refused_keeps_no_mark_for_zero():
    module = MLP()
    module.forward = module.forward
    with pytest.raises(ValueError, match="its forward was replaced"):
        patch_tiles(module, 40, 1 << 20)
    assert "_z3_leaf" not in vars(module)


def test_a_recipe_that_finds_none_says_so():
    model = tiny_model("bert")  # its feed-forward layer is no module of its own
    plan = memopt.plan_for(model, load_recipe("exact-unfolded", ["tiles.method=tokens"]))
    assert any("has one that could" in note for note in plan.notes)


def test_a_recipe_may_say_how_many_tokens_a_tile_has():
    model, inputs, calls = model_of("llama"), tiny_inputs("llama"), []
    ours = patched(model, "tiles.tokens=5")
    states = [swap_state(m) for m in ours.modules() if is_swapped(m) and isinstance(swap_state(m), TileRewrite)]
    assert [state.tokens(inputs["input_ids"]) for state in states] == [5, 5]
    ours.model.layers[0].mlp.register_forward_hook(lambda module, args, output: calls.append(output.shape))
    assert worst(gradients(ours, inputs), gradients(model, inputs)) <= LIMIT["llama"]
    assert calls  # of the module as a whole


def test_checks_run_by_tiles_though_their_batches_are_small(tmp_path):
    """Else `memopt verify` would see whole modules only."""
    from memopt.pipeline import patch_checkpoint
    from memopt.verification.trial import CheckpointTrial

    tiny_model("llama").save_pretrained(tmp_path / "stock")
    patch_checkpoint(tmp_path / "stock", tmp_path / "ours", "long-context")
    for recipe, tokens in ((load_recipe("long-context"), 8), (load_recipe("exact-unfolded"), 0)):
        model = CheckpointTrial(tmp_path / "ours", recipe).patched()
        states = [swap_state(m) for m in model.modules() if is_swapped(m) and isinstance(swap_state(m), TileRewrite)]
        assert {state.at_once for state in states} == {tokens}


class Noting(MLP):
    """Adds a number to a list inside an argument, as routers do that note their losses."""

    def forward(self, x: Tensor, notes: Any = None) -> Tensor:
        y = super().forward(x)
        if notes is not None:
            notes = vars(notes) if isinstance(notes, types.SimpleNamespace) else notes
            (notes["found"] if isinstance(notes, dict) else notes[-1]).append(float(y.detach().sum()))
        return y


#: An argument to which a module may add -> it, empty.
NOTES: dict[str, Callable[[], Any]] = {
    "list in a list": lambda: [[]],
    "list in a tuple": lambda: ([],),
    "list in a dictionary": lambda: {"found": []},
    "list in an object": lambda: types.SimpleNamespace(found=[]),
}


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("kind", NOTES)
def test_a_module_that_notes_something_in_an_argument_runs_whole(kind, by_name, differentiated):
    module = Noting().double()
    found = []
    for each in (module, tiled(copy.deepcopy(module))):
        given = NOTES[kind]()
        checkpoint(lambda x, of=each, to=given: of(x, notes=to) if by_name else of(x, to), X, use_reentrant=False)
        found.append(given)
    assert found[0] == found[1] != NOTES[kind]()
    step(tiled(copy.deepcopy(module)), X)
    assert differentiated, "no tile has run without the argument, so the test shows nothing"
