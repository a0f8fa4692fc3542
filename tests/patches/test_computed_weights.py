"""Weights that each forward computes (parametrisations, quantisation-aware training): read as often as in stock, and as
much is saved as with plain weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.prune import l1_unstructured
from transformers import DebertaV2Config, DebertaV2Model

import memopt
from memopt.trace.account import account
from tests.factories import tiny_inputs, tiny_model


class Count(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.number += 1
        return weight * 1.0


class Drop(nn.Module):
    """Noise on a weight, as DropConnect adds it."""

    def forward(self, weight: Tensor) -> Tensor:
        return F.dropout(weight, 0.2)


def step(model: nn.Module, name: str) -> tuple[Tensor, Tensor]:
    """The loss and the next random number."""
    torch.manual_seed(3)
    loss = model(**tiny_inputs(name, 2, 8)).loss
    loss.backward()
    return loss.detach(), torch.rand(1)


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3", "mistral"])
def test_a_weight_is_computed_as_often_as_in_stock(name: str) -> None:
    stock = tiny_model(name)
    counts = []
    for model in (stock, memopt.patch(copy.deepcopy(stock), "exact-unfolded")):
        step(model, name)
        counted = {}
        for at, module in list(model.named_modules()):
            if isinstance(module, nn.Linear) and "lm_head" not in at:
                counted[at] = Count()
                parametrize.register_parametrization(module, "weight", counted[at])
        for each in counted.values():
            each.number = 0
        step(model, name)
        counts.append({at: each.number for at, each in counted.items()})
    assert counts[0] == counts[1]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["noise", "spectral norm"])
def test_a_parametrised_down_projection_trains_as_in_stock(kind: str, when: str) -> None:
    stock = tiny_model("llama").train()
    patched = tiny_model("llama").train() if when == "before" else memopt.patch(copy.deepcopy(stock), "exact-unfolded")
    for model in (stock, patched):
        torch.manual_seed(0)  # of the spectral norm's vectors
        for module in [each for at, each in model.named_modules() if at.endswith("down_proj")]:
            if kind == "noise":
                parametrize.register_parametrization(module, "weight", Drop())
            else:
                spectral_norm(module)
    if when == "before":
        memopt.patch(patched, "exact-unfolded")
    for _ in range(2):
        for one, other in zip(step(stock, "llama"), step(patched, "llama"), strict=True):
            torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)
    for one, other in zip(stock.buffers(), patched.buffers(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)
    for a, b in zip(stock.parameters(), patched.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-6)


class Standardised(nn.Linear):
    """A linear whose own forward computes its weight."""

    def forward(self, x: Tensor) -> Tensor:
        weight = F.layer_norm(self.weight, self.weight.shape[1:])
        return F.linear(x, weight, self.bias)


class Quantised(nn.Linear):
    """A linear that is trained for weights of few bits: rounded in groups, with the gradient of what was rounded."""

    def forward(self, x: Tensor) -> Tensor:
        groups = self.weight.unflatten(-1, (-1, 4))
        scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-6) / 7
        rounded = (groups / scale).round().clamp(-8, 7) * scale
        return F.linear(x, (groups + (rounded - groups).detach()).flatten(-2), self.bias)


class Hidden(torch.autograd.Function):
    """A product as float8 training computes it: of casts, one row at a time, with the inputs saved as they were."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x.float().unsqueeze(-2) * weight.float()).sum(-1).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return dy @ weight, dy.flatten(0, -2).T @ x.flatten(0, -2)


class HiddenProduct(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = Hidden.apply(x, self.weight)
        return product if self.bias is None else product + self.bias


CLASSES = {"standardised": Standardised, "quantised": Quantised, "hidden product": HiddenProduct}


def with_computed_weights(kind: str, name: str = "llama") -> nn.Module:
    """A model in train mode and fp64 whose linears in the blocks compute their weights."""
    model = tiny_model(name, torch.float64, intermediate_size=128).train()
    for at, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear) or "layer" not in at:
            continue
        torch.manual_seed(len(at))  # of the spectral norm's vectors
        if kind == "weight norm":
            weight_norm(module)
        elif kind == "spectral norm":
            spectral_norm(module)
        elif kind == "noise":
            parametrize.register_parametrization(module, "weight", Drop())
        elif kind == "pruned":
            l1_unstructured(module, "weight", 0.3)
        elif kind != "plain":
            module.__class__ = CLASSES[kind]
    return model


def kept(model: nn.Module, name: str) -> int:
    def run() -> Tensor:
        torch.manual_seed(3)
        loss: Tensor = model(**tiny_inputs(name, 2, 8)).loss
        return loss

    run().backward()  # the first step exchanges linears
    return account(model, run).total


KINDS = ["weight norm", "spectral norm", "noise", "pruned", *CLASSES]


@pytest.mark.parametrize("name", ["llama", "bert"])
@pytest.mark.parametrize("kind", KINDS)
def test_as_much_is_saved_as_in_a_model_with_plain_weights(kind: str, name: str) -> None:
    saved = {}
    for each in ("plain", kind):
        model = with_computed_weights(each, name)
        before = kept(model, name)
        memopt.patch(model)
        saved[each] = before - kept(model, name)
    assert saved[kind] == saved["plain"] > 0


#: Model -> the relative error of gradients in fp64: Llama's norms compute in fp32, some of them twice.
ERROR = {"llama": 16 * torch.finfo(torch.float32).eps, "bert": 1e-10}


@pytest.mark.parametrize("name", ERROR)
@pytest.mark.parametrize("recipe", ["exact-unfolded", "exact-levels", "long-context"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_computed_weights_trains_as_in_stock(kind: str, recipe: str, name: str) -> None:
    stock, patched = with_computed_weights(kind, name), with_computed_weights(kind, name)
    memopt.patch(patched, recipe)
    for _ in range(2):
        for one, other in zip(step(stock, name), step(patched, name), strict=True):
            torch.testing.assert_close(other, one, rtol=1e-6, atol=0)
    largest = max(float(each.grad.norm()) for each in stock.parameters())
    for a, b in zip(stock.parameters(), patched.parameters(), strict=True):
        assert (b.grad - a.grad).norm() <= ERROR[name] * largest


@pytest.mark.parametrize("kind", ["weight norm", "hidden product"])
def test_a_head_of_a_computed_weight_has_whole_logits_and_no_such_linear_is_sampled(kind: str) -> None:
    model = tiny_model("llama").train()
    if kind == "weight norm":
        weight_norm(model.lm_head)
    else:
        model.lm_head.__class__ = HiddenProduct
    sites = memopt.plan_for(model).sites
    (head,) = [site for site in sites.linears if site.module == "lm_head"]
    assert head.computed
    assert not any(each.computed for each in sites.linears if each is not head)
    assert sites.loss_heads == ()
    assert not sites.notes
    sampled = memopt.plan_for(with_computed_weights(kind), "wta-crs")
    assert not sampled.chosen("linear", "sample")
    refusals = [each for each in sampled.refusals if each.kind == "linear" and "self_attn.o_proj" in each.site]
    assert {each.reason for each in refusals} == {"each forward computes its weight anew, or hides the product"}


class Called(nn.Module):
    """A linear that its parent calls with another weight, as models do whose weights other modules compute."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        up: Tensor = torch.func.functional_call(self.up, {"weight": self.up.weight.tanh()}, (self.norm(x),))
        return x + self.down(self.act(up))


class LowRank(nn.Linear):
    """Its own weight has no part in what it computes."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.left, self.right = nn.Parameter(torch.randn(8, 2)), nn.Parameter(torch.randn(2, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.left @ self.right, self.bias)


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (Called(), [("up.weight", True), ("down.weight", False)]),
        (nn.Sequential(LowRank(), nn.Linear(8, 8)), [("0.left", True), ("1.weight", False)]),
    ],
)
def test_a_product_is_one_linear_whoever_computes_its_weight(model: nn.Module, found: list[tuple[str, bool]]) -> None:
    sites = memopt.plan_for(model, inputs={"x" if isinstance(model, Called) else "input": torch.randn(2, 3, 8)}).sites
    assert sites.ran
    assert [(site.parameter, site.computed) for site in sites.linears] == found


def test_attention_to_what_parameters_give_is_no_linear() -> None:
    config = DebertaV2Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
        relative_attention=True, pos_att_type=["c2p", "p2c"],
    )  # fmt: skip
    sites = memopt.plan_for(DebertaV2Model(config)).sites
    assert sites.linears
    assert not any(site.computed for site in sites.linears)
