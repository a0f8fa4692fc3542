"""Kept outputs of attention, and offloaded inputs, which the model changes in place in their block or behind it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers import NystromformerConfig, NystromformerForSequenceClassification

from memopt.patches.checkpointing import offload
from memopt.patches.checkpointing.kept import KeptAttention
from tests.patches.test_kept_attention import Operators, equal, gradients, patched


class CopiedLate:
    """A tensor that goes to CPU memory on a stream of its own, which copies it only when backward needs it."""

    def __init__(self, tensor: Tensor, *_: object) -> None:
        self._tensor = tensor.detach()

    def fetch(self) -> None:
        pass

    def take(self) -> Tensor:
        return self._tensor.clone()


def matmul_of_heads(p: Tensor, v: Tensor) -> Tensor:
    return torch.matmul(p.view(2, 2, 5, 5), v.view(2, 2, 5, 4)).view(4, 5, 4)


def sdpa(p: Tensor, v: Tensor) -> Tensor:
    # A fused kernel saves its output, whose change in place autograd refuses; newer releases fuse 3 dimensions too.
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(p @ v, v, v)


def no_view(p: Tensor, v: Tensor) -> Tensor:
    return torch.ops.aten._unsafe_view(torch.bmm(p, v), [4, 20]).reshape(4, 5, 4)


def add_all(y: Tensor, other: Tensor) -> Tensor:
    torch._foreach_add_([y], [other])
    return y


def add_out(y: Tensor, other: Tensor) -> Tensor:
    torch.add(y.detach(), other, out=y.detach())
    return y


def add_to_data(y: Tensor, other: Tensor) -> Tensor:
    y.data.add_(other)
    return y


PRODUCTS = {"bmm": torch.bmm, "matmul": torch.matmul, "4 dimensions": matmul_of_heads, "sdpa": sdpa, "alias": no_view}
STORES = pytest.mark.parametrize("store", [None, CopiedLate], ids=["here", "copied late"])


def runs(
    product: Callable[..., Tensor],
    *,
    inside: Callable[..., object] = lambda y, other: y,
    behind: Callable[..., object] = lambda y, other: y,
    store: type | None = None,
) -> tuple[Tensor, Tensor, int]:
    """The gradient of a plain block, of one that keeps attention, and the number of products in its backward."""

    def block(x: Tensor, w: Tensor) -> Tensor:
        q = (x @ w).view(2, 5, 2, 4).transpose(1, 2).reshape(4, 5, 4)
        y = product(torch.bmm(q, q.transpose(-1, -2)).softmax(-1), q)
        inside(y, torch.tanh(q))
        return y if is_outside else (y * y).reshape(2, -1)

    def gradient(call: Callable[..., Tensor]) -> Tensor:
        y = call(x, w)
        if is_outside:
            behind(y, torch.full_like(y, 0.5))
        with operators:
            return torch.autograd.grad(y.square().sum(), w)[0]

    def kept_block(x: Tensor, w: Tensor) -> Tensor:
        with kept.repeat() if entered else kept:
            entered.append(1)
            return block(x, w)

    is_outside = behind is not runs.__kwdefaults__["behind"]
    torch.manual_seed(0)
    x, w = torch.randn(2, 5, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    operators, entered, kept = Operators(), [], KeptAttention(store)
    plain = gradient(block)
    operators.calls.clear()
    ours = gradient(lambda *args: checkpoint(kept_block, *args, use_reentrant=False))
    return plain, ours, operators.calls["bmm"]


@STORES
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("change", [Tensor.add_, add_all, add_out])
def test_an_output_that_its_block_changes_in_place_has_the_gradient_of_a_plain_block(product, store, change):
    plain, ours, _ = runs(PRODUCTS[product], inside=lambda y, other: change(y, other.detach()), store=store)
    assert torch.equal(ours, plain)


@STORES
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("change", [Tensor.add_, add_to_data])
def test_an_output_that_is_changed_in_place_behind_its_block_has_the_gradient_of_a_plain_block(product, store, change):
    plain, ours, _ = runs(PRODUCTS[product], behind=change, store=store)
    assert torch.allclose(ours, plain, rtol=1e-12)


@STORES
def test_a_product_runs_again_only_where_its_output_is_changed_or_leaves_the_block(store):
    kept = runs(torch.matmul, store=store)[2]
    assert runs(torch.matmul, inside=lambda y, other: y.sin().add_(other), store=store)[2] == kept
    assert runs(torch.matmul, inside=Tensor.add_, store=store)[2] == kept + 1
    assert runs(torch.matmul, behind=lambda y, other: y, store=store)[2] == kept + 1


def test_a_product_into_memory_of_the_caller_is_written_in_both_runs():
    def run() -> Tensor:
        p, y = torch.linspace(-1, 1, 8).view(2, 2, 2).softmax(-1), torch.zeros(2, 2, 2)
        torch.bmm(p, p, out=y)
        return y.clone()

    kept = KeptAttention()
    with kept:
        first = run()
    with kept.repeat():
        assert torch.equal(run(), first)


@pytest.mark.parametrize("settings", [[], ["checkpointing.offload=input"]], ids=["here", "copied late"])
def test_nystromformer_adds_to_its_attention_in_place(settings, monkeypatch):
    torch.manual_seed(0)
    config = NystromformerConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, vocab_size=100, num_labels=3
    )
    model = NystromformerForSequenceClassification(config).double()
    inputs = {"input_ids": torch.randint(0, 100, (2, 64)), "labels": torch.tensor([0, 2])}
    plain = gradients(patched(copy.deepcopy(model), "checkpointing.keep=none"), inputs)
    monkeypatch.setattr(offload, "_Waiting", CopiedLate)
    assert equal(gradients(patched(model, "checkpointing.keep=attention", *settings), inputs), plain)


def test_an_input_that_changes_in_place_while_it_is_copied_is_an_error_in_backward(monkeypatch):
    monkeypatch.setattr(offload, "_Waiting", CopiedLate)
    monkeypatch.setattr(offload.OffloadedInputs, "stream", lambda self, device: object())
    x = torch.ones(3, requires_grad=True)

    def loss(change: Callable[[Tensor], object]) -> Tensor:
        hidden = x * 2
        with offload.OffloadedInputs().of_a_block().hooks():
            y = checkpoint(torch.sin, hidden, use_reentrant=False)
        change(hidden)
        return y.sum()

    loss(Tensor.sin).backward()
    assert torch.allclose(x.grad, 2 * torch.cos(2 * x))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss(lambda hidden: hidden.detach().add_(1)).backward()
