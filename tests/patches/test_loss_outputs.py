"""``outputs.logits`` of a patched head: usable like the stock model's, whoever reads them."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memopt
from memopt.api import plan_for
from memopt.kernels.loss.reference import LossArguments
from memopt.patches.apply import apply
from memopt.patches.loss import plain
from memopt.patches.loss.lazy import LazyLogits
from tests.factories import tiny_inputs, tiny_model
from tests.patches.logit_cases import in_chunks
from tests.patches.test_loss import CLASSES, Model, _recipe, assert_close, gradients, models
from tests.support.compare import stock_and_patched

pytestmark = pytest.mark.filterwarnings("ignore:.*computed whole")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    in_chunks(monkeypatch, lambda x: 64 * 12)


def pair() -> tuple[Model, LazyLogits, Tensor]:
    stock, ours = models()
    logits: Any = ours()
    return ours, logits, stock().detach()


def test_shapes_and_dtypes_read_no_value() -> None:
    _, logits, stock = pair()
    assert logits.shape == stock.shape
    assert (logits.size(-1), logits.dim(), len(logits), logits.numel()) == (CLASSES, 3, 4, stock.numel())
    assert (logits.dtype, logits.device, logits.stride()) == (stock.dtype, stock.device, stock.stride())
    assert (logits.requires_grad, logits.is_leaf, logits.grad_fn is None) == (True, False, False)
    assert not logits.detach().requires_grad
    assert [isinstance(logits, Tensor), torch.is_tensor(logits), torch.is_floating_point(logits)] == [True] * 3
    assert logits.value is None


def test_code_that_takes_the_address_of_uncomputed_logits_gets_an_error() -> None:
    """Extensions in C++ do, and no function of Python sees that."""
    _, logits, stock = pair()
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch.utils.dlpack.to_dlpack(logits.detach())
    assert torch.equal(torch.from_dlpack(logits.detach()), stock)


def test_logits_detached_in_place_stay_uncomputed_and_hold_no_graph() -> None:
    """Schedules of torch.distributed.pipelining detach the last stage's output after its backward."""
    _, logits, stock = pair()
    F.cross_entropy(logits.flatten(0, 1), torch.zeros(len(stock.flatten(0, 1)), dtype=torch.long)).backward()
    assert logits.detach_() is logits
    assert (logits.value, logits.requires_grad, logits.grad_fn) == (None, False, None)
    assert logits.source.x.grad_fn is None
    torch.testing.assert_close(logits.as_subclass(Tensor), stock)


LIKE = {
    "ones_like": torch.ones_like,
    "ones_like in another dtype": lambda y: torch.ones_like(y, dtype=torch.float64, requires_grad=True),
    "zeros_like by name": lambda y: torch.zeros_like(input=y),
    "full_like": lambda y: torch.full_like(y, 3.0),
    "empty_like": lambda y: torch.empty_like(y).fill_(0.0),
    "new_zeros": lambda y: y.new_zeros(2, 3),
    "new_full": lambda y: y.new_full((2,), 1.5),
    "new_ones in another dtype": lambda y: y.new_ones(3, dtype=torch.int64),
}


@pytest.mark.parametrize("name", LIKE)
def test_a_tensor_of_the_same_shape_reads_no_value(name: str) -> None:
    _, logits, stock = pair()
    made, wanted = LIKE[name](logits), LIKE[name](stock)
    assert logits.value is None
    assert type(made) is Tensor
    assert (made.dtype, made.stride(), made.requires_grad) == (wanted.dtype, wanted.stride(), wanted.requires_grad)
    assert torch.equal(made.detach(), wanted.detach())


USES = {
    "numpy": lambda y: torch.from_numpy(y.detach().numpy()),
    "a cast and numpy": lambda y: torch.from_numpy(y.detach().float().double().cpu().numpy()),
    "deepcopy": lambda y: copy.deepcopy(y.detach()),
    "pickle": lambda y: pickle.loads(pickle.dumps(y.detach())),
    "tolist": lambda y: torch.tensor(y.tolist(), dtype=torch.float64),
    "clone": lambda y: y.clone(),
    "one column": lambda y: torch.stack([y[..., column] for column in range(CLASSES)], -1),
    "a transposed view": lambda y: y.transpose(1, 2).contiguous().transpose(1, 2),
    "an operator of torch.ops": lambda y: torch.ops.aten.relu(y) - torch.ops.aten.relu(-y),
    "cat": lambda y: torch.cat([y[:2], y[2:]]),
    "vmap": lambda y: torch.vmap(lambda row: row * 1.0)(y),
    "einsum": lambda y: torch.einsum("abc->abc", y),
}


@pytest.mark.parametrize("name", USES)
def test_logits_can_be_used(name: str) -> None:
    _, logits, stock = pair()
    found = USES[name](logits)
    torch.testing.assert_close(torch.as_tensor(found.as_subclass(Tensor)).double(), stock, rtol=1e-6, atol=1e-6)


def test_saving_them_saves_their_values() -> None:
    _, logits, stock = pair()
    file = io.BytesIO()
    torch.save({"logits": logits.detach()}, file)
    file.seek(0)
    loaded = torch.load(file)["logits"]
    assert type(loaded) is Tensor
    torch.testing.assert_close(loaded, stock)


def test_printing_shows_values() -> None:
    _, logits, stock = pair()
    assert repr(logits.detach()) == repr(stock)


METRICS = {
    "accuracy": lambda y: y.argmax(-1),
    "a confidence": lambda y: y.softmax(-1).max(dim=-1).values,
    "entropy": lambda y: -(F.log_softmax(y, -1).exp() * F.log_softmax(y, -1)).sum(-1),
    "the best five": lambda y: torch.topk(y, 5, dim=-1).indices,
    "log-probabilities": lambda y: y.logsumexp(dim=-1, keepdim=True),
    "of shifted logits": lambda y: y[:, :-1, :].reshape(-1, CLASSES).argmax(dim=1),
}


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("name", METRICS)
def test_metrics_run_by_chunks(name: str, detached: bool) -> None:
    _, logits, stock = pair()
    with torch.set_grad_enabled(detached):
        found = METRICS[name](logits.detach() if detached else logits)
    assert type(found) is Tensor
    assert not found.requires_grad
    assert logits.value is None
    torch.testing.assert_close(found, METRICS[name](stock))


def test_a_change_in_place_is_seen_by_views_and_by_no_copy() -> None:
    found = []
    for model in models():
        logits = model()
        view, copied = logits.view(-1, CLASSES), logits.float()
        logits /= 2
        logits[:, 0] = 0.0
        found.append(
            [
                logits.detach().as_subclass(Tensor),
                view.detach().as_subclass(Tensor),
                copied.detach().as_subclass(Tensor),
                *gradients(model, F.cross_entropy(view, torch.arange(len(view)))).values(),
            ]
        )
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_any_other_loss_is_differentiated_as_in_the_stock_model() -> None:
    for loss in (lambda y: y.sin().mean(), lambda y: (y * torch.ones_like(y)).sum(), lambda y: y.std()):
        stock, ours = models()
        assert_close(gradients(ours, loss(ours())), gradients(stock, loss(stock())))


class _Reversed(torch.autograd.Function):
    """A user's function: it returns a copy, and turns the gradient round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return -dy


class _Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * x).sum()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * dy


def _of_allowed_tokens(logits: Tensor) -> Tensor:
    logits[..., [0, 5]] = -3.0
    result: Tensor = _Squared.apply(logits)
    return result


@pytest.mark.parametrize(
    "loss",
    [
        lambda y: F.cross_entropy(_Reversed.apply(y)[:, 0], torch.arange(4)),
        _Squared.apply,
        _of_allowed_tokens,
    ],
)
def test_a_users_function_keeps_its_backward(loss: Any) -> None:
    stock, ours = models()
    assert_close(gradients(ours, loss(ours())), gradients(stock, loss(stock())))


@pytest.mark.parametrize("change", ["head.weight", "x"])
def test_reading_them_after_a_change_in_place_is_an_error(change: str) -> None:
    _, model = models()
    x = model.body(model.x)
    logits = model.head(x)
    with torch.no_grad():
        (x if change == "x" else model.head.weight).add_(1)
    for read in (Tensor.sum, lambda y: y.argmax(-1), lambda y: F.cross_entropy(y[:, 0], torch.arange(4)), repr):
        with pytest.raises(RuntimeError, match=r"changed in place.*loss\.method=none"):
            read(logits)


def test_a_change_between_loss_and_backward_is_an_error() -> None:
    _, model = models()
    loss = F.cross_entropy(model()[:, 0], torch.arange(4))
    with torch.no_grad():
        model.head.weight.add_(1)
    with pytest.raises(RuntimeError, match=r"changed in place|modified by an inplace operation"):
        loss.backward()


def test_a_second_derivative_is_refused() -> None:
    _, model = models()
    loss = F.cross_entropy(model()[:, 0], torch.arange(4))
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, model.head.weight, create_graph=True)


def test_a_graph_that_is_retained_gives_the_same_twice() -> None:
    _, model = models()
    loss = F.cross_entropy(model()[:, 0], torch.arange(4))
    first = torch.autograd.grad(loss, model.head.weight, retain_graph=True)[0].clone()
    assert torch.equal(torch.autograd.grad(loss, model.head.weight)[0], first)


def test_who_read_them_whole_is_said_once_a_place() -> None:
    _, model = models()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            model().sin()
        model().cos()
    assert [str(each.message).split("since ")[1].split(" reads")[0] for each in seen] == ["'sin'", "'cos'"]
    assert "test_loss_outputs.py" in str(seen[0].message)


@pytest.mark.parametrize(
    "metric",
    [
        lambda y: y.argmax(-1),
        lambda y: y[:, 1:].argmax(-1),
        lambda y: F.cross_entropy(y.view(-1, CLASSES), torch.arange(len(y.view(-1, CLASSES))) % CLASSES),
        lambda y: y.detach().float().max(-1).values,
        lambda y: (y * 0.5 + 1).logsumexp(-1),
        lambda y: y.clone().sin(),
        lambda y: y.sin(),
    ],
)
def test_metrics_in_inference_mode_leave_the_gradients(metric: Any) -> None:
    stock, ours = models()
    logits, expected = ours(), stock()
    with torch.inference_mode():
        torch.testing.assert_close(metric(logits), metric(expected))
    assert_close(gradients(ours, logits.sin().sum()), gradients(stock, expected.sin().sum()))


def test_logits_as_a_plain_tensor_have_the_graph_of_what_was_written_into_them() -> None:
    found = []
    for model in models():
        logits = model()
        logits[..., :3].clamp_(-0.1, 0.1)
        plain = logits.as_subclass(Tensor)
        logits[..., 4:].mul_(3)
        found.append(gradients(model, plain.square().sum()))
        assert plain._version == logits._version == 2
    assert_close(*found)


def test_a_hooked_head_is_stock_and_an_unhooked_one_is_not() -> None:
    _, model = models()
    handle = model.head.register_forward_hook(lambda *given: None)
    assert type(model()) is Tensor
    handle.remove()
    assert type(model()) is LazyLogits


def test_a_head_with_adapters_runs_by_chunks() -> None:
    import peft

    found = []
    for patched in (False, True):
        model = tiny_model("llama", torch.float64, tie_word_embeddings=False)
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["lm_head", "q_proj"], lora_dropout=0.0))
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                torch.manual_seed(0)
                nn.init.normal_(parameter)
        model = model.double()
        if patched:
            applied = apply(model, plan_for(model, _recipe()))
            assert applied.done == {"loss": ("base_model.model.lm_head",)}
        given = tiny_inputs("llama", 2, 12)
        output = model(**{**given, "labels": given["input_ids"]})
        assert isinstance(output.logits, LazyLogits) is patched
        assert not patched or output.logits.value is None
        found.append(gradients(model, output.loss))
    assert_close(found[1], found[0], 1e-5)  # transformers computes the loss in fp32


# -- what a stock model's logits allow, and a careless stand-in gets wrong ------------------------------------------


def fitted(logits: Tensor, model: Any) -> Any:
    z = logits / model.scale
    return -(z.softmax(-1) * z.log_softmax(-1)).sum(-1)


AS_STOCK = {
    "other rows of the same logits": lambda y, m: (y[:, 1:] - y[:, :-1]).logsumexp(-1),
    "one half against the other": lambda y, m: (y[:2].softmax(-1) * y[2:].log_softmax(-1)).sum(-1),
    "a tensor that is read twice": fitted,
    "a temperature for detached logits": lambda y, m: F.cross_entropy((y.detach() / m.scale)[:, 0], torch.arange(4)),
    "logits by name": lambda y, m: torch.gather(input=y, dim=2, index=torch.ones(4, 6, 1, dtype=torch.long)),
    "a change after a whole read": lambda y, m: _masked(y, y.view(-1, CLASSES)),
    "an output argument": lambda y, m: torch.max(y.detach(), -1, out=(y.new_empty(0), torch.empty(0).long()))[0],
    "a hook": lambda y, m: _hooked(y, y.view(-1, CLASSES)),
}  # fmt: skip


def _masked(logits: Tensor, view: Tensor) -> Tensor:
    logits.masked_fill_(logits > 0, -5.0)
    return F.cross_entropy(view, torch.arange(len(view)))


def _hooked(logits: Tensor, view: Tensor) -> Tensor:
    logits.register_hook(lambda gradient: gradient * 2)
    return F.cross_entropy(view, torch.arange(len(view)))


@pytest.mark.parametrize("name", AS_STOCK)
def test_values_and_gradients_are_the_stock_ones(name: str) -> None:
    found = []
    for model in models():
        model.scale = nn.Parameter(torch.tensor(1.7, dtype=torch.float64))
        result = AS_STOCK[name](model(), model)
        found.append((result.detach().clone(), gradients(model, result.sum()) if result.requires_grad else {}))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-10, atol=1e-10)
    assert found[1][1].keys() == found[0][1].keys()
    for key, gradient in found[0][1].items():
        torch.testing.assert_close(found[1][1][key], gradient, rtol=1e-10, atol=1e-10)


def test_weights_that_are_lent_for_a_call() -> None:
    found = []
    for model in models(bias=True):
        lent = {name: (value * 2).detach().requires_grad_() for name, value in model.named_parameters()}
        loss = F.cross_entropy(torch.func.functional_call(model, lent, ())[:, 0], torch.arange(4))
        found.append((loss, *torch.autograd.grad(loss, tuple(lent.values()))))
    torch.testing.assert_close(found[1], found[0])


def test_a_weight_that_is_a_view_of_another_parameter() -> None:
    """... as FSDP1 keeps it: the head has no parameter of its own."""
    found = []
    for model in models():
        flat = nn.Parameter(model.head.weight.detach().flatten())
        del model.head.weight
        model.head.weight = flat.view(CLASSES, -1)
        loss = F.cross_entropy(model()[:, 0], torch.arange(4))
        found.append((loss, *torch.autograd.grad(loss, flat)))
    torch.testing.assert_close(found[1], found[0])


def test_a_weight_that_was_replaced() -> None:
    _, model = models()
    logits = model()
    model.head.weight = nn.Parameter(model.head.weight[:150].detach() * 2)
    with pytest.raises(RuntimeError, match="replaced since"):
        F.cross_entropy(logits[:, 0], torch.arange(4))
    assert model().shape == (4, 6, 150)


def test_detached_logits_keep_no_graph_alive() -> None:
    class Token:
        pass

    (_, model), token = models(), Token()
    hidden, alive = torch.tanh(model.body(model.x)), weakref.ref(token)
    hidden.grad_fn.metadata["token"] = token
    logits = model.head(hidden)
    detached, stock = logits.view(-1, CLASSES).detach(), nn.functional.linear(hidden, model.head.weight).detach()
    del logits, hidden, token
    gc.collect()
    assert alive() is None
    torch.testing.assert_close(detached.as_subclass(Tensor), stock.view(-1, CLASSES))


def test_a_gradient_of_logits_that_are_never_whole_is_an_error() -> None:
    _, logits, _ = pair()
    F.cross_entropy(logits[:, 0], torch.arange(4))
    with pytest.raises(RuntimeError, match=r"no gradient of their own.*loss\.method=none"):
        logits.retain_grad()


def test_fp16_gradients_are_made_where_the_loss_scale_is_known() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        _, model = models(dtype=torch.float32)
        with torch.autocast("cpu", dtype):
            logits: Any = model().view(-1, CLASSES)
        small = dataclasses.replace(logits.source, width=1)
        assert plain.Plain(small, LossArguments()).is_at_once is (dtype == torch.bfloat16)


def test_logits_that_every_rank_has_to_gather_again_are_read_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = memopt.patch(tiny_model("llama")).train(), tiny_inputs("llama", 2, 16)
    monkeypatch.setattr("memopt.patches.loss.module.is_partitioned", lambda tensor: True)  # as ZeRO-3's are
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = model(**batch)
        output.loss.backward()
        logits = model(**{name: each for name, each in batch.items() if name != "labels"}).logits
        assert logits.argmax(-1).shape == batch["labels"].shape
    with pytest.warns(UserWarning, match="a rank that reads them alone waits"):
        found = output.logits.argmax(-1)
    assert torch.equal(found, memopt.unpatch(model)(**batch).logits.argmax(-1))


class _Doubled(torch.autograd.Function):
    """Changes a copy in place, as collectives do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        x.mul_(2)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * gradient


def test_a_plain_tensor_of_what_a_function_returned_has_its_gradient() -> None:
    found = []
    for model in stock_and_patched(lambda: tiny_model("llama"), "exact-unfolded"):
        y = _Doubled.apply(model(**tiny_inputs("llama", 2, 8)).logits).as_subclass(Tensor)  # type: ignore[no-untyped-call]
        (y * torch.arange(y.numel()).view(y.shape).sin()).sum().backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-3)
