"""Checkpointed blocks that keep the output of their attention."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import memopt
from memopt.patches.checkpointing import kept
from memopt.patches.checkpointing.kept import KeptAttention
from memopt.patches.checkpointing.module import patch_block
from memopt.plan.recipe import load_recipe
from tests.factories import tiny_inputs, tiny_model
from tests.support.compare import step_gradients

LAYERS = {"llama": 2, "bert": 2, "gpt2": 3, "t5": 2}
gradients = functools.partial(step_gradients, seed=0)


class Operators(TorchDispatchMode):
    """Counts the operators inside."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[function.__name__.partition(".")[0]] += 1
        return function(*args, **(kwargs or {}))

    @property
    def attention(self) -> int:
        return sum(n for name, n in self.calls.items() if "attention" in name and "backward" not in name)


def patched(model: nn.Module, *settings: str) -> nn.Module:
    model = copy.deepcopy(model).train()
    return memopt.patch(model, load_recipe("exact-unfolded", ["checkpointing.method=full", *settings]))


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], each) for name, each in theirs.items())


@pytest.mark.parametrize("settings", [[], ["checkpointing.offload=input"]])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.rotates(3)
def test_attention_does_not_run_again_and_gradients_are_equal_to_the_bit(name, attention, settings):
    model, inputs = tiny_model(name, torch.float64), tiny_inputs(name)
    model.set_attn_implementation(attention)
    counts, found = [], []
    for keep in ("none", "attention"):
        ours = patched(model, f"checkpointing.keep={keep}", *settings)
        with Operators() as operators:
            found.append(gradients(ours, inputs))
        counts.append(operators)
    assert equal(*found)
    fused = counts[0].attention - counts[1].attention
    products = counts[0].calls["bmm"] - counts[1].calls["bmm"]
    encoder_and_decoder = 3 if name == "t5" else 1  # attentions in a pair of its blocks
    assert fused + products == LAYERS[name] * encoder_and_decoder
    assert bool(fused) == (attention == "sdpa")
    assert bool(products) == (attention == "eager" or name == "t5")  # its learned bias rules fused attention out


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_dropout_of_attention_drops_the_same(attention):
    model, inputs = tiny_model("llama", torch.float64, attention_dropout=0.4), tiny_inputs("llama")
    model.set_attn_implementation(attention)
    plain, kept_ = (gradients(patched(model, f"checkpointing.keep={k}"), inputs) for k in ("none", "attention"))
    assert equal(kept_, plain)


def test_a_backward_in_another_thread_finds_what_was_kept():
    model, inputs = tiny_model("llama", torch.float64), tiny_inputs("llama")
    expected = gradients(patched(model), inputs)
    ours = patched(model, "checkpointing.keep=attention")
    loss = ours(**inputs).loss
    with Operators() as operators, ThreadPoolExecutor(1) as thread:
        thread.submit(loss.backward).result()
    assert operators.attention == 0
    assert equal({n: p.grad for n, p in ours.named_parameters() if p.grad is not None}, expected)


class Block(nn.Module):
    """Attention over itself; `after` may change its output."""

    def __init__(self, after=lambda y: y) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lift, self.after = nn.Linear(8, 24, dtype=torch.float64), after

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.lift(x)[:, None].chunk(3, -1)
        return x + self.after(F.scaled_dot_product_attention(q, k, v)).squeeze(1).sin()


def block(after=lambda y: y, *, keeps: bool) -> Block:
    module = Block(after)
    patch_block(module, None, True, None, keeps)
    return module


def input_gradient(module: nn.Module, times: int = 1) -> tuple[Tensor, int]:
    x = torch.linspace(-1, 1, 96, dtype=torch.float64).view(2, 6, 8).requires_grad_()
    y = module(x)
    with Operators() as operators:
        for left in reversed(range(times)):
            y.square().sum().backward(retain_graph=left > 0)
    return x.grad, operators.attention


@pytest.mark.parametrize("change", [lambda y: y.mul_(2), lambda y: y.transpose(1, 2).mul_(2).transpose(1, 2)])
def test_an_output_that_is_changed_in_place_is_computed_again(change):
    (ours, again), (plain, _) = (input_gradient(block(change, keeps=keeps)) for keeps in (True, False))
    assert torch.equal(ours, plain)
    assert again == 1


def test_a_retained_graph_computes_attention_again():
    (ours, again), (plain, often) = (input_gradient(block(keeps=keeps), 2) for keeps in (True, False))
    assert torch.equal(ours, plain)
    assert (again, often) == (1, 2)


def test_a_wrong_output_would_be_seen(monkeypatch):
    monkeypatch.setattr(kept._Here, "take", lambda self: self._tensor * 1.01)
    assert not torch.allclose(input_gradient(block(keeps=True))[0], input_gradient(block(keeps=False))[0])


def test_what_was_kept_is_not_held_any_longer_than_autograd_holds_it():
    seen = []

    def hooked(y: Tensor) -> Tensor:
        y.register_hook(lambda gradient: seen.append(gradient))
        return y

    attention = KeptAttention()
    x = torch.randn(2, 6, 8, dtype=torch.float64, requires_grad=True)
    module, entered = Block(hooked), []

    def run(x: Tensor) -> Tensor:
        with attention.repeat() if entered else attention:
            entered.append(1)
            return module(x)

    y = checkpoint(run, x, use_reentrant=False)
    assert len(attention._kept) == 1
    y.sum().backward()
    assert seen
    assert not attention._kept


def test_an_operator_of_another_package_is_kept_by_what_it_is_called():
    calls = []

    @torch.library.custom_op("memopt_test::flash_attn_forward", mutates_args=())
    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(1)
        scores = (q @ k.mT).softmax(-1)
        return scores @ v, scores.sum(-1)

    def backward(ctx, dy, _):
        return dy, dy, dy

    attend.register_autograd(backward)
    assert kept._is_attention(torch.ops.memopt_test.flash_attn_forward.default)
    assert not kept._is_attention(torch.ops.aten._scaled_dot_product_flash_attention_backward.default)
    assert not kept._is_attention(torch.ops.aten.mm.default)
    attention = KeptAttention()
    q = torch.randn(1, 4, 8)
    with attention:
        first = [each.clone() for each in attend(q, q, q)]
    with attention.repeat():
        again = attend(q, q, q)
    assert len(calls) == 1
    assert all(map(torch.equal, first, again))


def test_compiled_blocks_keep_it_too():
    model = block(keeps=True)
    expected = input_gradient(block(keeps=False))[0]
    compiled = torch.compile(model, backend="aot_eager")
    assert torch.allclose(input_gradient(compiled)[0], expected, rtol=1e-12)


def test_the_plan_says_what_is_kept():
    model = patched(tiny_model("llama"), "checkpointing.keep=attention")
    assert "its attention's output" in str(memopt.summary(model).plan.rewrites)


def test_a_compiler_compiles_no_code_of_the_mode() -> None:
    """Compiled code may call eager code inside, whose operators pass through the mode."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    @torch._dynamo.disable(recursive=False)
    def eager(x: Tensor) -> Tensor:
        return torch.add(x, 1)

    @torch.compile(backend=backend)
    def compiled(x: Tensor) -> Tensor:
        return eager(x.sin()).cos()

    with KeptAttention():
        compiled(torch.randn(3))
    assert not any(isinstance(node.target, torch._ops.OpOverload) for graph in graphs for node in graph.graph.nodes)
    assert len(graphs) == 2
