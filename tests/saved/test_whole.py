"""Operations whose backward has a jump or a pole in what they save get it whole, so compression gives them no bias."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

import memopt
from memopt.kernels.activation.function import recomputed_activation
from memopt.patches.compression.compressor import Compressor
from memopt.recompute.rules import FAMILIES
from memopt.saved import RecomputeScope
from memopt.saved.whole import kept_whole, saving
from tests.factories import tiny_inputs, tiny_model

TOKENS, WIDTH, OUTLIER = 16, 128, 50.0
Function = Callable[[Tensor], Tensor]

JUMPS: dict[str, Function] = {
    "relu": F.relu, "leaky_relu": F.leaky_relu, "relu6": F.relu6, "hardtanh": F.hardtanh, "hardswish": F.hardswish,
    "clamp": lambda z: z.clamp(-1, 1), "operator": torch.ops.aten.hardtanh.default,
    "in place": lambda z: (z + 0).relu_(), "abs": torch.abs, "threshold": lambda z: F.threshold(z, 0.5, 0.0),
    "selu": F.selu, "maximum": lambda z: z.maximum(-z),
}  # fmt: skip
POLES: dict[str, Function] = {
    "quotient": lambda z: z / z.sigmoid(), "divisor": lambda z: 3.0 / z, "reciprocal": torch.reciprocal,
    "power": lambda z: z**-2, "log": lambda z: torch.log(z + 1000.0), "sqrt": lambda z: torch.sqrt(z + 1000.0),
}  # fmt: skip
ROUGH = JUMPS | POLES


def weights() -> Tensor:
    """One strong unit in each group of 128."""
    w = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))
    w[:, 0] = OUTLIER
    return w.requires_grad_()


def gradient(function: Function, *, compresses: bool) -> Tensor:
    w = weights()

    def block() -> Tensor:
        return function(w * 2.0)

    if compresses:
        with RecomputeScope(FAMILIES, Compressor, torch.zeros(TOKENS, WIDTH)):
            y = block()
    else:
        y = block()
    (found,) = torch.autograd.grad(y.sum(), w)
    return found


@pytest.mark.parametrize("name", ROUGH)
def test_a_gradient_with_a_jump_or_a_pole_is_exact(name: str) -> None:
    exact, actual = (gradient(ROUGH[name], compresses=compresses) for compresses in (False, True))
    torch.testing.assert_close(actual, exact, rtol=0, atol=0)


@pytest.mark.parametrize("function", [F.gelu, torch.square, lambda z: z**2, torch.sin])
def test_what_smooth_operations_save_is_compressed(function: Function) -> None:
    assert not torch.equal(gradient(function, compresses=True), gradient(function, compresses=False))


def test_what_a_kink_reads_is_not_recomputed_from_compressed_tensors() -> None:
    def program(z: Tensor) -> Tensor:
        return recomputed_activation(z, torch.tanh, "tanh").abs()

    exact, actual = (gradient(program, compresses=compresses) for compresses in (False, True))
    assert torch.equal(actual.sign(), exact.sign())
    assert not torch.equal(actual, exact)  # the slope of tanh is read from 8 bits


def test_the_state_ends_with_the_operation_and_with_the_scope() -> None:
    with RecomputeScope(FAMILIES, Compressor, torch.zeros(TOKENS, WIDTH)):
        with pytest.raises(RuntimeError):
            torch.clamp(torch.ones(3, requires_grad=True))
        with kept_whole():
            torch.sin(torch.ones(3))
            assert saving.whole
        assert not saving.whole
    assert torch.overrides._len_torch_function_stack() == 0  # type: ignore[attr-defined]


# --- whole models ----------------------------------------------------------------------------------------------------


def opt(activation: str) -> nn.Module:
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=64, hidden_size=32, ffn_dim=128, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=32,
        dropout=0.0, max_position_embeddings=32, activation_function=activation,
    )  # fmt: skip
    model = OPTForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3) if weight.dim() > 1 else weight.add_(torch.randn_like(weight) * 0.1)
        for layer in model.model.decoder.layers:
            layer.fc1.bias[::64] += OUTLIER
    return model.train()


def gradients(model: nn.Module, seed: int = 0) -> Tensor:
    ids = torch.randint(3, 64, (4, 32), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(seed)
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


def off_by(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "relu6", "hardswish"])
def test_one_strong_unit_does_not_flip_the_masks_of_the_others(activation: str) -> None:
    stock = opt(activation)
    expected = gradients(copy.deepcopy(stock).double())
    patched = memopt.patch(stock, "int8")
    draws = [gradients(patched, seed) for seed in range(8)]
    assert 0 < off_by(draws[0], expected) < 0.02
    one = sum(off_by(draw, expected) for draw in draws) / len(draws)
    assert off_by(sum(draws[1:], draws[0]) / len(draws), expected) < 0.6 * one  # without a bias: 0.35


def test_gate_and_up_of_a_gate_with_a_kink_are_kept_whole() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        hidden_act="relu",
    )  # fmt: skip
    stock = LlamaForCausalLM(config).train()
    exact, actual = (gradients(memopt.patch(copy.deepcopy(stock), name)) for name in ("exact-unfolded", "mesa"))
    torch.testing.assert_close(actual, exact, rtol=0, atol=0)


def test_blocks_without_a_module_for_their_mlp_stay_exact_and_a_note_says_it() -> None:
    stock = opt("gelu")
    plan = memopt.plan_for(stock, "mesa")
    assert any("2 blocks have no module for their MLP" in note for note in plan.notes)
    exact, actual = (gradients(memopt.patch(copy.deepcopy(stock), name)) for name in ("exact-unfolded", "mesa"))
    torch.testing.assert_close(actual, exact, rtol=0, atol=0)


@pytest.mark.parametrize("part", ["block", "MLP"])
def test_compiled_code_inside_has_one_graph(part: str) -> None:
    model = memopt.patch(tiny_model("opt" if part == "block" else "llama").train(), "int8")
    blocks = model.model.decoder.layers if part == "block" else [layer.mlp for layer in model.model.layers]
    for each in blocks:
        each.compile(backend="aot_eager", fullgraph=part == "MLP")
    model(**tiny_inputs("opt")).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
