"""What a scope keeps in 8 bits: what is compressed and what is left, and what gradients are made of it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import memopt
from memopt.kernels.norm.function import NormSpec, ms_norm
from memopt.kernels.quantize import quantize as kernel
from memopt.kernels.quantize.layout import GROUP, LEVELS
from memopt.kernels.quantize.quantize import dequantize, quantize
from memopt.patches.compression import compressor as compression
from memopt.patches.compression.compressor import Compressor
from memopt.recompute.rules import FAMILIES, NORMALISED
from memopt.saved import RecomputeScope
from memopt.trace.account import account, live_bytes
from tests import factories
from tests.saved.builders import GatedMLP

TOKENS, WIDTH = 16, 32
ELEMENTS = TOKENS * WIDTH
Program = Callable[[], Tensor]


def hidden() -> Tensor:
    return torch.zeros(TOKENS, WIDTH)


def scope() -> RecomputeScope:
    return RecomputeScope(FAMILIES, Compressor, hidden())


def leaf(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape or (TOKENS, WIDTH), generator=generator).to(dtype).requires_grad_()


def compressed(program: Program) -> Tensor:
    """The program is a function of its own: when it returns, nobody refers to what it made."""
    with scope():
        return program()


def bytes_of(elements: int) -> int:
    """Codes, and a minimum and a step in fp32 for each group."""
    return elements + -(-elements // GROUP) * 8


def decoded(tensor: Tensor) -> Tensor:
    return dequantize(quantize(tensor.detach().reshape(-1), seed=0)).view_as(tensor)


@pytest.fixture
def at_random() -> None:
    """Rounding is left as it is."""


@pytest.fixture(autouse=True)
def to_the_nearest(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn is 1/2, so that every seed decodes a tensor to the same one."""
    if "at_random" not in request.fixturenames:
        monkeypatch.setattr(kernel, "uniform", lambda index, seed: torch.full(index.shape, 0.5))


def gradient(program: Program, *leaves: Tensor) -> list[Tensor]:
    """By backward(), which reentrant checkpointing needs."""
    for each in leaves:
        each.grad = None
    program().sum().backward()
    return [each.grad for each in leaves if each.grad is not None]


def is_exact(program: Program, *leaves: Tensor) -> bool:
    inside = gradient(lambda: compressed(program), *leaves)
    return all(map(torch.equal, gradient(program, *leaves), inside))


def quantised_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Elements of each storage that is compressed from now on."""
    sizes: list[int] = []

    def counted(x: Tensor, *how: Any) -> Any:
        sizes.append(x.numel())
        return quantize(x, *how)

    monkeypatch.setattr(compression, "quantize", counted)
    return sizes


def relative(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


# --- what is compressed ----------------------------------------------------------------------------------------------


def test_what_only_autograd_refers_to_is_kept_in_few_bits() -> None:
    w = leaf()
    assert live_bytes(lambda: compressed(lambda: (w * 2).sin())) == bytes_of(ELEMENTS)


def test_a_storage_that_one_reader_keeps_is_not_compressed_for_others() -> None:
    w = leaf(2 * TOKENS, WIDTH)

    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            return ctx.saved_tensors[0].cos() * dy

    def program() -> Tensor:
        z = w * 2
        return Sine.apply(z[:TOKENS]) + z[TOKENS:].sin()

    assert live_bytes(lambda: compressed(program)) <= 2 * ELEMENTS * 4


def test_a_storage_is_compressed_once_for_all_its_views_and_readers() -> None:
    w = leaf()

    def program() -> Tensor:
        z = w * 2
        half, turned = z[:, : WIDTH // 2], z.t()
        return z.sin() + z.cos() + turned.cos().t() + F.pad(half.sin(), (0, WIDTH // 2)) + z.view(-1).cos().view_as(z)

    assert live_bytes(lambda: compressed(program)) == bytes_of(ELEMENTS)
    expected = gradient(program, w)[0]
    assert relative(gradient(lambda: compressed(program), w)[0], expected) < 0.02


def test_an_operation_that_reads_twice_decodes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    w, decodings = leaf(), []

    def counted(quantized: Any) -> Tensor:
        decodings.append(quantized)
        return dequantize(quantized)

    monkeypatch.setattr(compression, "dequantize", counted)

    def program() -> Tensor:
        z = w * 2
        return z * z.view(-1).view_as(z)

    gradient(lambda: compressed(program), w)
    assert len(decodings) == 1


def test_strides_and_offsets_come_back() -> None:
    w, seen = leaf(2 * TOKENS, WIDTH), []

    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            seen.append((x.stride(), x.storage_offset()))
            return x.sin()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            seen.append((x.stride(), x.storage_offset()))
            return x.cos() * dy

    gradient(lambda: compressed(lambda: Sine.apply((w * 2)[TOKENS:].t()) * 1.0), w)
    assert seen == [((1, WIDTH), ELEMENTS)] * 2


def test_reports_count_what_is_left() -> None:
    model, inputs = factories.tiny_model("bert"), factories.tiny_inputs("bert")
    stock = live_bytes(lambda: model(**inputs))
    memopt.patch(model, "int8")

    def run() -> Any:
        return model(**inputs)

    counted = account(model, run)
    assert counted.total == live_bytes(run)
    assert counted.unseen == 0
    assert counted.total < 0.6 * stock


# --- what is left ----------------------------------------------------------------------------------------------------


def _held(w: Tensor, held: list[Tensor]) -> Tensor:
    held.append(w * 2)
    return held[-1].sin()


def _with_a_held_view(w: Tensor, held: list[Tensor]) -> Tensor:
    z = w * 2
    held.append(z[:1].detach())
    return z.sin()


_FROZEN, _TRAINED = nn.Parameter(leaf(seed=1).detach(), requires_grad=False), nn.Parameter(leaf(seed=2).detach())
_TABLE, _INDEX = leaf(seed=3).detach(), torch.arange(TOKENS).unsqueeze(1).expand(TOKENS, WIDTH).clone()
#: The saved tensors in words -> the block, a function of a leaf and of a list that outlives it.
LEFT: dict[str, Callable[[Tensor, list[Tensor]], Tensor]] = {
    "a frozen parameter": lambda w, held: (w * 1) * _FROZEN,
    "a trained parameter": lambda w, held: (w * 1) * _TRAINED,
    "a table that blocks share": lambda w, held: (w * 1) * _TABLE,
    "a tensor that somebody refers to": _held,
    "a storage with a view that somebody refers to": _with_a_held_view,
    "what the block returns": lambda w, held: (w * 2).tanh(),
    "a statistic of rows": lambda w, held: (
        w.detach().square().mean(-1, keepdim=True).mul(w[:, :1]).cosh().sin().expand(TOKENS, WIDTH)
    ),
    "whole numbers": lambda w, held: (w * 2).gather(0, _INDEX.flip(0)),
}


@pytest.mark.parametrize("what", LEFT)
def test_what_is_not_autograds_alone_or_has_few_numbers_is_left(what: str) -> None:
    w, held = leaf(), list[Tensor]()
    assert is_exact(lambda: LEFT[what](w, held), w)


def test_a_buffer_is_left() -> None:
    w, module = leaf(), nn.Module()
    module.register_buffer("table", torch.randn(TOKENS, WIDTH))
    assert is_exact(lambda: (w * 1) * module.table, w)
    assert live_bytes(lambda: compressed(lambda: (w * 1) * module.table)) == 0


@pytest.mark.parametrize("hides", [float("-inf"), torch.finfo(torch.float32).min])
def test_an_attention_mask_is_left(hides: float) -> None:
    q, k, v = (leaf(1, 2, TOKENS, WIDTH // 2, seed=seed) for seed in range(3))
    mask = torch.zeros(1, 2, TOKENS, TOKENS).masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), hides)

    def program() -> Tensor:
        return F.scaled_dot_product_attention(q * 1, k * 1, v * 1, attn_mask=mask).square()

    expected, actual = gradient(program, q, k, v), gradient(lambda: compressed(program), q, k, v)
    assert all(relative(a, e) < 0.05 for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("autocast", [False, True])
def test_a_16_bit_copy_of_a_frozen_weight_is_left(autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    linear, x = nn.Linear(WIDTH, 2 * WIDTH, bias=False).requires_grad_(False), leaf()
    sizes = quantised_sizes(monkeypatch)

    def program() -> Tensor:
        if not autocast:
            return F.linear((x * 1).bfloat16(), linear.weight.bfloat16()).float()
        with torch.autocast("cpu", torch.bfloat16):
            return linear(x * 1).float()

    gradient(lambda: compressed(program), x)
    assert sizes == []


def test_a_change_in_place_after_it_was_kept_is_still_an_error() -> None:
    w = leaf()

    def program() -> Tensor:
        z = w * 2
        y = z.sin()
        z.add_(1)
        return y * 1

    loss = compressed(program).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_change_in_place_after_the_block_is_still_an_error() -> None:
    w = leaf()
    y = compressed(lambda: (w * 2).tanh())
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_an_expanded_statistic_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    w, sizes = leaf(), quantised_sizes(monkeypatch)

    def program() -> Tensor:
        rstd = (w[:, :1] * 2).cosh() * 1
        return (w * 2).mul(rstd.expand(TOKENS, WIDTH)).sin()

    gradient(lambda: compressed(program), w)
    assert TOKENS not in sizes
    assert ELEMENTS in sizes


def test_the_logsumexp_of_attention_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (leaf(1, 2, TOKENS, WIDTH // 2, seed=seed) for seed in range(3))
    sizes = quantised_sizes(monkeypatch)
    gradient(lambda: compressed(lambda: F.scaled_dot_product_attention(q * 1, k * 1, v * 1) * 1.0), q, k, v)
    assert set(sizes) == {ELEMENTS}


def test_a_negated_view_and_its_base_have_their_own_signs() -> None:
    w = leaf(TOKENS, 2 * WIDTH)

    def program() -> Tensor:
        z = torch.view_as_complex((w * 2).view(TOKENS, WIDTH, 2))
        return z.conj().imag.square() + z.imag.pow(3) + z.real.pow(3)

    assert relative(gradient(lambda: compressed(program), w)[0], gradient(program, w)[0]) < 0.05


def test_without_the_count_of_references_nothing_is_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    w = leaf()
    monkeypatch.setattr("memopt.saved.pinned.storage_use_count", lambda identity: math.inf)
    assert is_exact(lambda: (w * 2).sin(), w)


@pytest.mark.parametrize(
    "how", [saved_tensors_hooks(lambda t: t.clone(), lambda t: t), torch.autograd.graph.save_on_cpu()]
)
def test_under_a_hook_of_somebody_nothing_is_compressed(how: saved_tensors_hooks) -> None:
    w = leaf()
    expected = gradient(lambda: (w * 2).sin(), w)[0]
    with how:
        loss = compressed(lambda: (w * 2).sin()).sum()
    assert torch.equal(torch.autograd.grad(loss, w)[0], expected)


# --- what comes back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.usefixtures("at_random")
def test_a_gradient_is_off_by_a_step_at_most(dtype: torch.dtype) -> None:
    w = leaf(dtype=dtype)
    # The gradient of z * z / 2 is the z that was kept.
    (actual,) = gradient(lambda: compressed(lambda: (w * 1).square() / 2), w)
    groups = w.detach().double().view(-1, GROUP)
    step = (groups.amax(1) - groups.amin(1)) / LEVELS
    rounding = 4 * torch.finfo(dtype).eps * groups.abs().amax(1)
    error = (actual.double().view(-1, GROUP) - groups).abs().amax(1)
    assert (error <= step + rounding).all()
    assert error.max() > step.min() / 8


@pytest.mark.usefixtures("at_random")
def test_rounding_at_random_has_no_bias() -> None:
    w = leaf()
    torch.manual_seed(0)
    runs = 400
    total = sum(gradient(lambda: compressed(lambda: (w * 1).square() / 2), w)[0] for _ in range(runs))
    groups = w.detach().view(-1, GROUP)
    step = (groups.amax(1) - groups.amin(1)).max() / 255
    # Each error has a deviation of half a step at most; of the 512 means none is 5 of theirs away.
    assert float((total / runs - w.detach()).abs().max()) < 5 * 0.5 * float(step) / runs**0.5


def test_a_gated_product_is_recomputed_from_decoded_tensors() -> None:
    torch.manual_seed(0)
    model, x = GatedMLP(), torch.randn(64, 8)
    with RecomputeScope(FAMILIES, Compressor, x):
        y = model(x)
    gate, up = (decoded(linear(x)) for linear in (model.gate, model.up))
    (actual,) = torch.autograd.grad(y.sum(), model.down.weight)
    torch.testing.assert_close(actual, torch.ones(8, 64) @ (F.silu(gate) * up), rtol=1e-5, atol=1e-5)


def test_the_output_of_a_norm_is_recomputed_from_decoded_tensors() -> None:
    torch.manual_seed(0)
    w, reader = leaf(), nn.Linear(WIDTH, 8)
    gamma, beta = (nn.Parameter(torch.randn(WIDTH)) for _ in range(2))

    def program() -> Tensor:
        y: Tensor = reader(ms_norm(w * 2, gamma, beta, NormSpec("layer", 1e-5), w.dtype))
        return y

    (actual,) = gradient(lambda: compressed(program), reader.weight)
    x_hat = decoded(F.layer_norm(w.detach() * 2, (WIDTH,)))
    torch.testing.assert_close(actual, torch.ones(8, TOKENS) @ (x_hat * gamma + beta), rtol=1e-4, atol=1e-4)


def test_nan_stays_nan() -> None:
    w = leaf()
    with torch.no_grad():
        w[3, 4] = float("nan")
    (actual,) = gradient(lambda: compressed(lambda: (w * 2).sin()), w)
    assert actual[3, 4].isnan()
    assert actual[4:].isfinite().all()  # another group


@pytest.mark.usefixtures("at_random")
def test_a_seed_repeats_a_gradient_and_another_one_does_not() -> None:
    w = leaf()

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return gradient(lambda: compressed(lambda: (w * 2).sin()), w)[0]

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


@pytest.mark.usefixtures("at_random")
def test_a_second_backward_gives_the_same_gradient() -> None:
    w = leaf()
    loss = compressed(lambda: (w * 2).sin()).sum()
    first = torch.autograd.grad(loss, w, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(loss, w)[0], first)


def test_batched_gradients_are_those_of_each_row() -> None:
    w, v = leaf(), torch.randn(3, TOKENS, WIDTH)
    y = compressed(lambda: (w * 2).sin())
    together = torch.autograd.grad(y, w, v, is_grads_batched=True, retain_graph=True)[0]
    each = [torch.autograd.grad(y, w, row, retain_graph=True)[0] for row in v]
    torch.testing.assert_close(together, torch.stack(each))


def test_after_backward_nothing_is_left() -> None:
    w = leaf()
    w.grad = torch.zeros_like(w)

    def run() -> Tensor:
        loss = compressed(lambda: (w * 2).sin()).sum()
        loss.backward()
        return loss

    assert live_bytes(run) == 0


# --- among other tools -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", [RecomputeScope, lambda: RecomputeScope(frozenset({NORMALISED})), scope])
def test_what_a_scope_inside_keeps_is_compressed_too(inner: Callable[[], RecomputeScope]) -> None:
    w = leaf()

    def narrow() -> Tensor:
        with inner():
            return (w * 2).sin()

    def program() -> Tensor:
        return narrow() * 1.0

    assert live_bytes(lambda: compressed(program)) == bytes_of(ELEMENTS)
    assert 0 < relative(gradient(lambda: compressed(program), w)[0], 2 * (2 * w.detach()).cos()) < 0.02


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_around_a_scope_gives_the_gradient(use_reentrant: bool) -> None:
    w = leaf()

    def run(x: Tensor) -> Tensor:
        return compressed(lambda: (x * 2).sin())

    (actual,) = gradient(lambda: checkpoint(run, w * 1, use_reentrant=use_reentrant), w)
    assert relative(actual, gradient(lambda: (w * 2).sin(), w)[0]) < 0.02


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_inside_a_scope_gives_the_gradient(use_reentrant: bool) -> None:
    w = leaf()

    def program() -> Tensor:
        return checkpoint(lambda x: (x * 2).sin(), w * 1, use_reentrant=use_reentrant) * 1.0

    assert relative(gradient(lambda: compressed(program), w)[0], gradient(program, w)[0]) < 0.05


@pytest.mark.parametrize("shape", [(0, WIDTH), (1, WIDTH), (3, 5, 1), (7,), ()])
def test_small_and_empty_inputs_run(shape: tuple[int, ...]) -> None:
    w = torch.randn(shape, requires_grad=True)

    def program() -> Tensor:
        return (w * 2).sin() * 1.0

    with RecomputeScope(FAMILIES, Compressor, w):
        y = program()
    (actual,) = torch.autograd.grad(y.sum(), w)
    torch.testing.assert_close(actual, gradient(program, w)[0], rtol=0.05, atol=0.05)


def test_an_error_inside_leaves_no_hook_behind() -> None:
    w = leaf()

    def program() -> Tensor:
        z = w * 2
        raise ValueError(f"inside {z.sin().shape}")

    with pytest.raises(ValueError, match="inside"):
        compressed(program)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_without_gradients_nothing_happens() -> None:
    w = leaf()
    with torch.no_grad(), scope():
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        assert not (w * 2).requires_grad


def test_two_blocks_that_share_a_tensor_leave_it() -> None:
    w = leaf()

    def run(scoped: bool) -> Tensor:
        context = w * 2

        def block(x: Tensor) -> Tensor:
            with scope() if scoped else nullcontext():
                y: Tensor = (context.sin() + x) * 1.0
                return y

        return block(block(torch.zeros(TOKENS, WIDTH)))

    assert torch.equal(gradient(lambda: run(True), w)[0], gradient(lambda: run(False), w)[0])


# --- whole models ----------------------------------------------------------------------------------------------------


def patched_pair(name: str, recipe: str) -> tuple[nn.Module, nn.Module, dict[str, Tensor]]:
    stock = factories.tiny_model(name).eval()
    return stock, memopt.patch(copy.deepcopy(stock), recipe), factories.tiny_inputs(name)


def all_gradients(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The loss, and every gradient in one row."""
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("recipe", ["int8", "mesa"])
@pytest.mark.parametrize("name", ["bert", "llama", "vit"])
def test_a_patched_model_has_the_same_loss_and_almost_the_gradient(name: str, recipe: str) -> None:
    stock, patched, inputs = patched_pair(name, recipe)
    (loss, expected), (same, actual) = all_gradients(stock, inputs), all_gradients(patched, inputs)
    torch.testing.assert_close(loss, same, rtol=1e-6, atol=1e-6)
    assert 1e-5 < relative(actual, expected) < 0.1


def test_a_copy_of_a_patched_model_gives_the_same_gradient() -> None:
    _, patched, inputs = patched_pair("bert", "int8")
    results = []
    for model in (patched, copy.deepcopy(patched)):
        torch.manual_seed(3)
        results.append(all_gradients(model, inputs)[1])
    assert torch.equal(*results)


def test_unpatched_it_is_exact_again() -> None:
    stock, patched, inputs = patched_pair("bert", "int8")
    assert torch.equal(all_gradients(memopt.unpatch(patched), inputs)[1], all_gradients(stock, inputs)[1])


def test_gradient_checkpointing_of_transformers_gives_the_gradient() -> None:
    stock, patched, inputs = patched_pair("llama", "int8")
    expected = all_gradients(stock, inputs)[1]
    for use_reentrant in (False, True):
        patched.train().gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        patched.enable_input_require_grads()
        assert relative(all_gradients(patched, inputs)[1], expected) < 0.1


def test_autocast_gives_almost_the_gradient() -> None:
    stock, patched, inputs = patched_pair("llama", "int8")
    with torch.autocast("cpu", torch.bfloat16):
        loss, expected = all_gradients(stock, inputs)
        same, actual = all_gradients(patched, inputs)
    torch.testing.assert_close(loss, same, rtol=1e-2, atol=1e-2)
    assert relative(actual, expected) < 0.1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_it_computes_the_stock_gradient(backend: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mlp = nn.LayerNorm(WIDTH), GatedMLPOf(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = x + self.mlp(self.norm(x))
            return y

    stock = nn.Sequential(Block(), Block())
    x = torch.randn(2, 8, WIDTH)
    patched = memopt.patch(copy.deepcopy(stock), "int8", inputs={"input": x})
    expected = torch.autograd.grad(stock(x).square().sum(), list(stock.parameters()))
    run = torch.compile(patched, backend=backend)
    actual = torch.autograd.grad(run(x).square().sum(), list(patched.parameters()))
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


class GatedMLPOf(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(width, 48), nn.Linear(width, 48), nn.Linear(48, width)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.act(self.gate(x)) * self.up(x))
        return y


class WithGaps(torch.autograd.Function):
    """Doubles; the rows of the result stand between others that hold nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gap: int) -> Tensor:
        rows = torch.full((TOKENS, WIDTH + gap), torch.nan)
        rows[:, gap:] = x * 2
        return torch.empty(0).set_(rows.untyped_storage(), gap, x.size(), rows.stride())

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return 2 * dy, None


@pytest.mark.parametrize("gap", [WIDTH // 8, 2 * WIDTH], ids=["compressed by itself", "copied before"])
def test_memory_that_was_never_written_beside_a_view_says_nothing(gap: int) -> None:
    x, weight = (torch.randn(TOKENS, WIDTH, requires_grad=True) for _ in range(2))

    def run() -> Tensor:
        with RecomputeScope(compression=Compressor, hidden=x):
            return (WithGaps.apply(x, gap) * weight).sum()

    assert live_bytes(run) < ELEMENTS * 4  # it was compressed
    for gradient in torch.autograd.grad(run(), [x, weight]):
        assert gradient.isfinite().all()


def test_a_tensor_is_quantised_as_soon_as_only_autograd_refers_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from memopt.patches.compression import compressor

    quantised: list[int] = []
    right = compressor.quantize
    monkeypatch.setattr(compressor, "quantize", lambda x, *rest: quantised.append(x.numel()) or right(x, *rest))
    x = leaf()
    with RecomputeScope(FAMILIES, Compressor, x):
        y = (x * 1).sin()
        assert quantised == []
        z = y.cos()
        assert len(quantised) == 1, "what sin saved waits for the end of the scope"
    assert len(quantised) == 1, "somebody still refers to y"
    z.sum().backward()
