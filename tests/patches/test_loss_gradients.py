"""Gradients that come past the logits of a patched head, or would have to be theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.utils import ModelOutput

from memopt.api import plan_for
from memopt.patches.apply import apply
from memopt.patches.loss import plain
from memopt.patches.loss.lazy import LazyLogits
from memopt.patches.loss.module import patch_head
from memopt.plan.recipe import load_recipe
from tests.factories import tiny_config, tiny_inputs
from tests.patches.logit_cases import in_chunks
from tests.patches.test_loss import CLASSES, LOSS_ONLY, READS, ROWS, WIDTH, Model, assert_close, flat, gradients, labels

pytestmark = pytest.mark.filterwarnings("ignore:.*computed whole")


@pytest.fixture(autouse=True, params=["by blocks of columns", "at once"])
def way(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    in_chunks(monkeypatch, lambda x: 64 * x.element_size(), ROWS=8, COLUMNS=64)
    monkeypatch.setattr(plain.Plain, "is_at_once", request.param == "at once")


def both(run: Callable[[Model], Any], *, lean: bool = False) -> tuple[Any, Any]:
    """What `run` returns for a stock model and for a patched one."""
    stock, ours = Model(bias=True), Model(bias=True)
    patch_head(ours.head, WIDTH, CLASSES, lean=lean)
    return run(stock), run(ours)


_WANTED: dict[str, Callable[[Tensor, Tensor], object]] = {
    "register_hook": lambda logits, loss: logits.register_hook(print),
    "retain_grad": lambda logits, loss: logits.retain_grad(),
    "a hook for several": lambda logits, loss: torch.autograd.graph.register_multi_grad_hook((logits,), print),
    "grad": lambda logits, loss: torch.autograd.grad(loss, logits),
    "grad of several": lambda logits, loss: torch.autograd.grad(inputs=[logits], outputs=[loss], allow_unused=True),
}


@pytest.mark.parametrize("name", _WANTED)
def test_a_gradient_of_logits_that_were_never_whole_is_an_error(name: str) -> None:
    model = Model()
    patch_head(model.head, WIDTH, CLASSES)
    logits = model()
    loss = F.cross_entropy(flat(logits), labels())
    with pytest.raises(RuntimeError, match=r"no gradient of their own.*retain_grad\(\) before.*loss\.method=none"):
        _WANTED[name](logits, loss)
    assert isinstance(logits, LazyLogits)
    assert logits.value is None


def test_a_gradient_that_was_asked_for_in_time_is_stock() -> None:
    def run(model: Model) -> list[Tensor]:
        logits, seen = model(), []
        logits.retain_grad()
        logits.register_hook(seen.append)
        loss = F.cross_entropy(flat(logits), labels())
        (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
        loss.backward()
        return [found, *seen, logits.grad]

    stock, ours = both(run)
    assert len(stock) == len(ours) == 4
    torch.testing.assert_close(ours, stock)


_PER_ROW: dict[str, Callable[[Tensor], Tensor]] = {
    "cross_entropy": lambda y: F.cross_entropy(flat(y), labels(), reduction="none"),
    "a cap": lambda y: F.cross_entropy(flat(torch.tanh(y / 30) * 30), labels(), reduction="none"),
    "class weights": lambda y: F.cross_entropy(
        flat(y), labels(), torch.arange(CLASSES).double(), reduction="none", label_smoothing=0.1
    ),
    "soft targets": lambda y: F.cross_entropy(flat(y), torch.eye(ROWS, CLASSES).double(), reduction="none"),
    "logsumexp": lambda y: flat(y).logsumexp(-1),
    "a mean": lambda y: F.cross_entropy(flat(y), labels()).expand(ROWS),
}


@pytest.mark.parametrize("how", ["is_grads_batched", "vmap"])
@pytest.mark.parametrize("name", _PER_ROW)
def test_batched_gradients(name: str, how: str) -> None:
    """... as of a Jacobian, or of each sample's loss."""

    def run(model: Model) -> tuple[Tensor, ...]:
        losses, weights = _PER_ROW[name](model()), (model.head.weight, model.head.bias, model.body.weight)
        every = torch.eye(ROWS).double()
        if how == "vmap":
            return torch.vmap(lambda dy: torch.autograd.grad(losses, weights, dy, retain_graph=True))(every)
        return torch.autograd.grad(losses, weights, every, is_grads_batched=True)

    stock, ours = both(run)
    torch.testing.assert_close(ours, stock)


@pytest.mark.parametrize("how", ["is_grads_batched", "vmap"])
def test_batched_gradients_of_the_lean_loss(how: str) -> None:
    def run(model: Model) -> tuple[Tensor, ...]:
        losses = F.cross_entropy(flat(model()), labels(), reduction="none")
        every = torch.eye(ROWS).double()
        if how == "vmap":
            return torch.vmap(lambda dy: torch.autograd.grad(losses, model.head.weight, dy, retain_graph=True))(every)
        return torch.autograd.grad(losses, model.head.weight, every, is_grads_batched=True)

    stock, ours = both(run, lean=True)
    torch.testing.assert_close(ours, stock)


@pytest.mark.parametrize("when", ["before the loss", "before backward"])
def test_a_weight_whose_data_was_exchanged_is_noticed(when: str) -> None:
    """No version counter counts that. Gradients that were made in the forward need no weight any more."""
    model = Model()
    patch_head(model.head, WIDTH, CLASSES)
    logits = model()
    loss = F.cross_entropy(flat(logits), labels()) if when == "before backward" else None
    model.head.weight.data = model.head.weight.data * 2
    if loss is None:
        with pytest.raises(RuntimeError, match=r"replaced since"):
            F.cross_entropy(flat(logits), labels())
    elif not plain.Plain.is_at_once:
        with pytest.raises(RuntimeError, match=r"replaced since"):
            loss.backward()


@pytest.mark.parametrize("name", ["a shift", "log_softmax and gather", "entropy", "a tensor of one element"])
@pytest.mark.parametrize("first", [True, False])
def test_a_second_loss_of_a_view_that_was_made_without_gradients(name: str, first: bool) -> None:
    def run(model: Model) -> dict[str, Tensor]:
        logits, total = model(), torch.zeros((), dtype=torch.float64)
        for is_main in (first, not first):
            if is_main:
                total = total + F.cross_entropy(flat(logits), labels())
            else:
                with torch.no_grad():
                    view = logits.view(logits.shape)
                total = total + READS[name](view)
        return {**gradients(model, total), "loss": total.detach()}

    stock, ours = both(run)
    assert_close(ours, stock)


@pytest.mark.parametrize("module", ["torch.distributed.fsdp._fully_shard._fsdp_state", "deepspeed.runtime.utils"])
def test_hooks_of_sharded_training_leave_the_logits_in_parts(module: str) -> None:
    """They wait for the moment when backward begins, whatever the gradient is."""
    moments: list[Any] = []
    hook = moments.append
    model = Model()
    patch_head(model.head, WIDTH, CLASSES)

    class Sharded:
        __module__ = module

        def __call__(self, gradient: Tensor) -> Tensor:
            hook(gradient)
            return gradient

    logits: Any = model()
    logits.register_hook(Sharded())
    logits.register_hook(Sharded()).remove()
    loss = F.cross_entropy(flat(logits), labels())
    logits.register_hook(Sharded())
    assert logits.value is None
    loss.backward()
    assert [gradient.shape for gradient in moments] == [()]
    whole = model()
    whole.register_hook(Sharded())
    whole.sin().sum().backward()
    assert [gradient.shape for gradient in moments] == [(), (4, ROWS // 4, CLASSES)]


class TwoHeads(transformers.LlamaForCausalLM):
    """... of which the second one predicts the token after the next."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.after_next = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        hidden = self.model(input_ids, **kwargs).last_hidden_state
        logits, later = self.lm_head(hidden), self.after_next(hidden) * 0.5
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            loss = loss + F.cross_entropy(later[:, :-2].flatten(0, 1), labels[:, 2:].flatten())
        return ModelOutput({"loss": loss, "logits": logits, "later_logits": later})


@pytest.mark.walks(shared=False)
def test_two_heads_are_two_sites() -> None:
    model = TwoHeads(tiny_config("llama")).double()
    given = {"input_ids": tiny_inputs("llama", 2, 12)["input_ids"]}
    given["labels"] = given["input_ids"]
    stock = gradients(model, model(**given).loss)
    plan = plan_for(model, load_recipe("exact-unfolded", LOSS_ONLY))
    assert apply(model, plan).done == {"loss": ("lm_head", "after_next")}
    assert [row.reason.split("reads: ")[1:] for row in plan.entries if row.kind == "loss"] == [[], ["scale 0.5"]]
    output = model(**given)
    assert isinstance(output.logits, LazyLogits)
    assert isinstance(output.later_logits, LazyLogits)
    assert output.logits.value is output.later_logits.value is None
    assert_close(gradients(model, output.loss), stock)


class Tied(Model):
    """... whose hidden states come from the head's weight as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH, dtype=torch.float64)
        self.head.weight = self.embedding.weight

    def forward(self) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.embedding(labels(0).view(4, -1))))
        return logits


_OF_ITS_WEIGHT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": lambda y, w: F.cross_entropy(flat(y), labels(), reduction="none"),
    "log_softmax and max": lambda y, w: flat(y).log_softmax(-1).amax(-1),
    "a scale": lambda y, w: flat(y / w.norm()).logsumexp(-1),
    "a scale and its square": lambda y, w: F.cross_entropy(flat(y / w.norm() / w.norm() ** 2), labels()),
    "a scale and softmax": lambda y, w: flat((y / w.norm()).softmax(-1)).amax(-1),
}


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("name", _OF_ITS_WEIGHT)
def test_what_the_heads_weight_also_computes_counts_once(name: str, batched: bool) -> None:
    """... the head's input, where the weight is tied, or a number that scales the logits."""
    found = []
    for patched in (False, True):
        model = Tied()
        if patched:
            patch_head(model.head, WIDTH, CLASSES)
        losses = _OF_ITS_WEIGHT[name](model(), model.head.weight).reshape(-1)
        every = torch.eye(len(losses)).double() if batched else torch.ones_like(losses)
        found.append(torch.autograd.grad(losses, model.head.weight, every, is_grads_batched=batched)[0])
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-12)


def test_an_error_names_the_tensor_that_was_changed() -> None:
    model, bias = Model(), torch.zeros(CLASSES).double()
    patch_head(model.head, WIDTH, CLASSES)
    logits = model() + bias
    bias.add_(1)
    with pytest.raises(RuntimeError, match=r"a tensor that they were combined with \('add by a tensor of 200'\)"):
        F.cross_entropy(flat(logits), labels())


class Biased(nn.Linear):
    """A head that the walk knows as no linear, with a parameter that its logits do not depend on."""

    def __init__(self) -> None:
        super().__init__(WIDTH, CLASSES)
        self.unread, self.shift = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + self.shift


def test_a_parameter_that_no_logit_depends_on_gets_no_gradient() -> None:
    def run(model: Model) -> set[str]:
        F.cross_entropy(flat(model()), labels()).backward()
        return {name for name, parameter in model.head.named_parameters() if parameter.grad is not None}

    stock, ours = Model(), Model()
    stock.head, ours.head = Biased().double(), Biased().double()
    patch_head(ours.head, WIDTH, CLASSES)
    assert run(ours) == run(stock) == {"weight", "bias", "shift"}
