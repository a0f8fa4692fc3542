"""Heads of models without transformers: found in outputs of any form and by the losses inside, trained in parts."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memopt
from memopt.errors import NegativeVerdict
from memopt.patches.loss import plain
from memopt.walk.calls.outputs import output_tensors
from memopt.walk.observe import walk_model
from tests.patches.logit_cases import in_chunks
from tests.support.largest import Largest
from tests.support.plain_models import (
    LOSSES,
    PADDED,
    VOCABULARY,
    WIDTH,
    Bare,
    Body,
    Capped,
    LossAlone,
    Pair,
    batch,
)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several chunks; logits that are computed whole are an error."""
    in_chunks(monkeypatch, lambda x: 2**12, ROWS=8, COLUMNS=64)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="memopt")
        yield


@pytest.fixture(params=["by blocks of columns", "at once"])
def way(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Each way to take a loss."""
    monkeypatch.setattr(plain.Plain, "is_at_once", request.param == "at once")
    return str(request.param)


def step(model: Body, *, grad: bool = True) -> tuple[Tensor, dict[str, Tensor], int]:
    """The loss, all gradients, and the largest tensor of the forward."""
    with torch.set_grad_enabled(grad), Largest() as largest:
        loss = LOSSES[type(model)](model, *batch())
    if grad:
        loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, largest.elements


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("cls", LOSSES)
@pytest.mark.rotates(3)
def test_training_is_stock_and_never_has_whole_logits(cls: type[Body], tied: bool, way: str) -> None:
    ours, stock = cls(tied=tied), cls(tied=tied)
    memopt.patch(ours)
    assert "1 loss: 1 chunked" in str(memopt.summary(ours))
    found, expected = step(ours), step(stock)
    # Sums of 96 losses and their gradients in fp32, each term rounded a few times.
    bound = 96 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(found[0], expected[0], rtol=bound, atol=0)
    scale = max(float(each.abs().max()) for each in expected[1].values())
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert float((found[1][name] - gradient).abs().max()) <= bound * scale, name
    rows_of_loss = 48 if cls is LossAlone else 96
    assert expected[2] >= rows_of_loss * VOCABULARY
    assert found[2] < rows_of_loss * VOCABULARY - 5 * VOCABULARY  # rows that are ignored count less


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("cls", LOSSES)
@pytest.mark.rotates(3)
def test_evaluation_is_stock_and_never_has_whole_logits(cls: type[Body], off: Any) -> None:
    ours, stock = memopt.patch(cls()).eval(), cls().eval()
    with off():
        (found, _, largest), (expected, _, whole) = step(ours, grad=False), step(stock, grad=False)
    torch.testing.assert_close(found, expected, rtol=96 * torch.finfo(torch.float32).eps, atol=0)
    assert largest < whole
    assert largest <= 96 * 4 * WIDTH  # an activation of an MLP


@pytest.mark.parametrize("cls", [cls for cls in LOSSES if cls is not LossAlone])
def test_a_generating_loop_reads_the_stock_logits(cls: type[Body]) -> None:
    ids, _ = batch()
    ours, stock = memopt.patch(cls()).eval(), cls().eval()
    with torch.no_grad():
        found, expected = ours(ids), stock(ids)
        pairs = list(zip(_tensors(found), _tensors(expected), strict=True))
    assert pairs
    assert all(torch.equal(a.as_subclass(Tensor), b) for a, b in pairs)


def _tensors(output: Any) -> Iterator[Tensor]:
    yield from (tensor for _, tensor in output_tensors(output))


def test_columns_that_pad_a_vocabulary_get_no_gradient(way: str) -> None:
    model = memopt.patch(Capped())
    step(model)
    gradient = model.lm_head.weight.grad
    assert gradient is not None
    assert gradient[:VOCABULARY].abs().amax(1).min() > 0
    assert torch.equal(gradient[VOCABULARY:], torch.zeros(PADDED - VOCABULARY, WIDTH))


def test_a_number_for_each_class_is_applied_to_the_columns_that_are_left(way: str) -> None:
    by_class = torch.linspace(-1, 1, VOCABULARY)
    found = []
    for patched in (False, True):
        model = Bare()
        model.lm_head = nn.Linear(WIDTH, PADDED)
        torch.manual_seed(1)
        nn.init.normal_(model.lm_head.weight)
        nn.init.normal_(model.lm_head.bias)
        if patched:
            memopt.patch(model)
        ids, targets = batch()
        shift = by_class.clone().requires_grad_()
        logits = model(ids)[..., :VOCABULARY] * 0.5 + shift
        loss = F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1), ignore_index=-1, label_smoothing=0.1)
        found.append([loss, *torch.autograd.grad(loss, (shift, model.lm_head.weight, model.lm_head.bias))])
    for ours, stock in zip(found[1], found[0], strict=True):
        assert float((ours - stock).abs().max()) <= 96 * torch.finfo(torch.float32).eps * float(stock.abs().max())


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_a_loss_of_another_reduction(reduction: str) -> None:
    ids, targets = batch()
    with torch.no_grad():
        found, expected = (
            model(ids, targets, loss_reduction=reduction) for model in (memopt.patch(Capped()), Capped())
        )
    torch.testing.assert_close(found, expected, rtol=96 * torch.finfo(torch.float32).eps, atol=0)


class _Casting(nn.Linear):
    """Weights in fp32, products in the dtype of the activations, as nanochat's."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def test_a_head_that_casts_its_weight() -> None:
    found, truth = [], []
    for patched in (False, True):
        model = Capped()
        model.lm_head = _Casting(WIDTH, PADDED, bias=False)
        model.lm_head.weight = Capped().lm_head.weight
        exact = Capped()
        exact.load_state_dict(model.state_dict())
        model.bfloat16().lm_head.float()
        if patched:
            memopt.patch(model)
        found.append(step(model))
        truth = [step(exact.double())[1]["lm_head.weight"]]
    (_, stock, whole), (_, ours, largest) = found
    assert largest < whole
    errors = [float((each["lm_head.weight"].double() - truth[0]).norm()) for each in (stock, ours)]
    assert errors[1] <= 1.1 * errors[0]


class _Counting(nn.Linear):
    """Counts its calls and keeps a mean of its input."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes, bias=False)
        self.calls = 0
        self.register_buffer("mean", torch.zeros(sizes[0]))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        with torch.no_grad():
            self.mean.lerp_(x.flatten(0, -2).mean(0), 0.1)
        return F.linear(x, self.weight)


def test_a_head_that_changes_its_state_is_left_with_the_reason() -> None:
    stock = Capped()
    stock.lm_head = _Counting(WIDTH, PADDED)
    patched = copy.deepcopy(stock)
    with pytest.warns(UserWarning, match="did not change lm_head: its forward changes the module's state"):
        memopt.patch(patched)
    assert (patched.lm_head.calls, float(patched.lm_head.mean.norm())) == (0, 0.0)
    for _ in range(2):
        (loss, gradients, _), (expected, wanted, _) = step(patched), step(stock)
        torch.testing.assert_close((loss, gradients), (expected, wanted))
    assert patched.lm_head.calls == stock.lm_head.calls
    torch.testing.assert_close(patched.lm_head.mean, stock.lm_head.mean)


# -- what is a head, and what is none -------------------------------------------------------------------------------


def heads(model: nn.Module, inputs: dict[str, Any] | None = None) -> list[tuple[str, int, str]]:
    return [(head.parameter, head.vocab_size, head.obstacle) for head in walk_model(model, inputs).loss_heads]


@pytest.mark.parametrize("cls", LOSSES)
def test_the_head_is_found(cls: type[Body]) -> None:
    assert heads(cls()) == [("lm_head.weight", VOCABULARY, "")]


def test_what_was_done_to_the_logits_is_said() -> None:
    (head,) = walk_model(Capped()).loss_heads
    assert head.operations == ("cap 15",)


class _Projected(Body):
    """An encoder that returns wide vectors of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(WIDTH, 4 * WIDTH, bias=False)

    def forward(self, idx: Tensor) -> Any:
        return self.lm_head(self.hidden(idx)), self.h[0].attn.c_attn(self.wte(idx))


class _Classifier(Body):
    """A loss over few classes of each row."""

    def forward(self, idx: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.lm_head(self.hidden(idx)[:, 0])
        return logits if labels is None else F.cross_entropy(logits, labels)


class _OfImages(nn.Module):
    """No embedding: it takes vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.norm, self.head = nn.Linear(12, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1000)

    def forward(self, pixels: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.patch(pixels)))
        return logits


def test_vectors_of_tokens_are_no_logits() -> None:
    assert heads(_Projected()) == []
    assert heads(_OfImages(), {"pixels": torch.randn(2, 9, 12)}) == []


class _OfPixels(_OfImages):
    """Its logits are one map an image, which a convolution computes, as in CLIPSeg."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.ConvTranspose2d(WIDTH, 1, 4, stride=4)

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        x = self.norm(self.patch(pixels)).transpose(1, 2)
        return {"logits": self.head(x.reshape(*x.shape[:2], 3, 3)).squeeze(1)}


def test_a_map_of_a_convolution_is_no_logits() -> None:
    model, pixels = _OfPixels(), torch.randn(2, 9, 12)
    assert heads(model, {"pixels": pixels}) == []
    memopt.patch(model, inputs={"pixels": pixels})(pixels)["logits"].sum().backward()


def test_a_loss_of_rows_has_all_its_logits_at_once() -> None:
    ((parameter, _, obstacle),) = heads(_Classifier(), {"idx": batch()[0], "labels": torch.tensor([1, 2])})
    assert parameter == "lm_head.weight"
    assert "not a row of classes for each token" in obstacle


class _Functional(Pair):
    """Its own forward computes the product, with the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        del self.lm_head

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        logits = F.linear(self.hidden(idx), self.wte.weight)
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_a_product_in_the_models_own_forward_is_left_with_the_reason() -> None:
    model = _Functional()
    with pytest.warns(UserWarning, match="did not change the forward of the model: the forward that"):
        memopt.patch(model)
    assert "loss" in str(memopt.summary(model))
    assert "1 chunked" not in str(memopt.summary(model))
    ids, targets = batch()
    assert model(ids, targets.clamp(min=0))[1].requires_grad


# -- inputs ---------------------------------------------------------------------------------------------------------


class _Needs(Body):
    """Requires what cannot be guessed."""

    def forward(self, idx: Tensor, bias: Tensor) -> Tensor:
        if bias.shape[-1] != WIDTH:
            raise ValueError("bias has the wrong width")
        logits: Tensor = self.lm_head(self.hidden(idx) + bias)
        return logits


def test_inputs_that_are_missing_are_said_and_may_be_given() -> None:
    with pytest.warns(
        UserWarning,
        match=r"could observe little of this model: .*with guessed inputs: .*bias has the wrong width.*Pass inputs="
        r"\{'idx': \.\.\., 'bias': \.\.\.\}, a training batch",
    ):
        memopt.patch(_Needs())
    given = memopt.patch(_Needs(), inputs={"idx": batch()[0], "bias": torch.zeros(WIDTH)})
    assert "1 loss: 1 chunked" in str(memopt.summary(given))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memopt.patch(_OfImages())  # images are guessed


def test_nothing_can_be_patched_is_said_where_it_was_tried() -> None:
    class Bag(nn.Module):
        def __init__(self, *, runs: bool) -> None:
            super().__init__()
            self.table, self.runs = nn.Embedding(9, 4), runs

        def forward(self, ids: Tensor) -> Tensor:
            if not self.runs:
                raise ValueError("weather is missing")
            pooled: Tensor = self.table(ids).mean(1)
            return pooled

    with pytest.raises(NegativeVerdict, match="Nothing in this model can be patched"):
        memopt.patch(Bag(runs=True))
    with (
        pytest.warns(UserWarning, match="weather is missing.*Pass inputs="),
        pytest.raises(NegativeVerdict, match=r"could not run this model.*Pass inputs=\{'ids': \.\.\.\}, a training"),
    ):
        memopt.patch(Bag(runs=False))
