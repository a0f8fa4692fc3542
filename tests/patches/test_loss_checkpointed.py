"""Logits that a checkpointed function reads: both runs of it save the same tensors, and the step is stock's."""

from __future__ import annotations

import functools
import gc
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from memopt.patches.loss.lazy import LazyLogits
from memopt.patches.loss.module import whole_logits
from tests.patches.logit_cases import BATCH, CLASSES, LABELS, LOSSES, OPERATIONS, READERS, TOKENS, in_chunks, made

Loss = Callable[[Any], Tensor]
_TEACHER = torch.randn(BATCH, TOKENS, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    in_chunks(monkeypatch, lambda x: 12 * CLASSES * 2, ROWS=2, COLUMNS=16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _jsd(y: Any) -> Tensor:
    student, teacher = F.log_softmax(y, -1), F.log_softmax(_TEACHER, -1)
    middle = torch.logsumexp(torch.stack([student, teacher]), 0)
    return F.kl_div(middle, student, log_target=True) + F.kl_div(middle, teacher, log_target=True)


def _entropy(y: Any) -> Tensor:
    return (y.logsumexp(-1) - (y.softmax(-1) * y).sum(-1)).mean()


def _mse(y: Any) -> Tensor:
    return F.mse_loss(y, _TEACHER)


def _cross_entropy(y: Any) -> Tensor:
    return F.cross_entropy(y.flatten(0, 1), LABELS)


_model = functools.partial(made, "plain", torch.float64)
_plain = functools.partial(checkpoint, use_reentrant=False)
_KINDS: dict[str, Callable[[Loss, Any], Tensor]] = {
    "plain": _plain,
    "closure": lambda loss, y: _plain(lambda _: loss(y), LABELS),
    "selective": functools.partial(
        _plain, context_fn=functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    ),
    "no early stop": functools.partial(_plain, early_stop=False),
    "inside another": lambda loss, y: _plain(lambda each: _plain(loss, each), y),
    "inside another, closure": lambda loss, y: _plain(lambda _: _plain(lambda _: loss(y), LABELS), LABELS),
}
#: The span (a loss of the logits), how it is checkpointed, and the logits -> the loss of the step
_WHOLE: dict[str, Callable[[Loss, Callable[[Loss, Any], Tensor], Any], Tensor]] = {
    "never": lambda span, under, y: under(span, y),
    "before": lambda span, under, y: _mse(y) + under(span, y),
    "after": lambda span, under, y: under(span, y) + _mse(y),
    "after, without a gradient": lambda span, under, y: (under(span, y), y.detach().std())[0],
    "first inside": lambda span, under, y: under(lambda y: _mse(y) + span(y), y),
    "last inside": lambda span, under, y: under(lambda y: span(y) + _mse(y), y),
    "between inside": lambda span, under, y: under(lambda y: _entropy(y) + _mse(y) + span(y), y),
    "between two": lambda span, under, y: under(span, y) + _mse(y) + under(span, y),
    "inside the second": lambda span, under, y: under(span, y) + under(_mse, y) + under(span, y),
}


def _step(loss_of: Callable[[Any], Tensor], patched: bool) -> list[Any]:
    """The loss and the gradients; the type of the error where the step has one."""
    model = _model(patched=patched)
    try:
        loss = loss_of(model())
        loss.backward()
    except (RuntimeError, IndexError, TypeError) as error:
        return [type(error)]
    return [loss.detach(), *(each.grad for each in model.parameters())]


def _same(loss_of: Callable[[Any], Tensor], rounding: float = 0.0) -> bool:
    """Whether the steps agree to 1e-9, or to a `rounding` of the largest number of a gradient."""
    stock, found = _step(loss_of, False), _step(loss_of, True)
    if len(stock) != len(found) or len(stock) == 1:
        return stock == found
    return all(
        torch.allclose(one, other, rtol=1e-9, atol=max(1e-9, rounding * float(other.abs().max())))
        for one, other in zip(found, stock, strict=True)
    )


_LOSSES = {"jsd": _jsd, "entropy": _entropy, "mse": _mse, "cross-entropy": _cross_entropy}


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("when", _WHOLE)
def test_a_checkpointed_loss_of_logits_is_stock(kind: str, when: str) -> None:
    different = [
        name for name, loss in _LOSSES.items() if not _same(lambda y, of=loss: _WHOLE[when](of, _KINDS[kind], y))
    ]
    assert not different


@pytest.mark.parametrize("count", [300, pytest.param(3000, marks=pytest.mark.slow)])
def test_a_matrix_of_checkpointed_programs_is_stock(count: int) -> None:
    def loss_of(span: tuple[str, str], when: str, kind: str, begins: str, y: Any) -> Tensor:
        operation, reader = OPERATIONS[span[0]], READERS[span[1]]
        if begins == "after the operation":
            z = operation(y)
            return _WHOLE[when](lambda given: _number(reader(z if given is y else given)), _KINDS[kind], y)
        return _WHOLE[when](lambda given: _number(reader(operation(given))), _KINDS[kind], y)

    # Stock refuses a write into an input of a checkpointed function; and fp16 rounds the gradient of each read alone.
    operations = [name for name in OPERATIONS if name not in ("columns set", "half and float")]
    spans = itertools.product(operations, READERS)
    programs = list(itertools.product(spans, _WHOLE, _KINDS, ("with the operation", "after the operation")))
    chosen = torch.randperm(len(programs), generator=torch.Generator().manual_seed(count))[:count].tolist()

    def rounding(span: tuple[str, str]) -> float:
        """Stock rounds the loss and each logit's gradient to the dtype that the logits are cast to; a loss in parts
        rounds its sum elsewhere. Each is half an eps, and the square of the loss doubles both."""
        dtype = OPERATIONS[span[0]](_TEACHER).dtype
        return 0.0 if dtype is torch.float64 or span[1] not in LOSSES else 2 * torch.finfo(dtype).eps

    different = [
        str(programs[index])
        for index in chosen
        if not _same(functools.partial(loss_of, *programs[index]), rounding(programs[index][0]))
    ]
    assert not different, f"{len(different)} of {count}:\n" + "\n".join(different[:20])


def _number(read: Tensor) -> Tensor:
    return read.float().square().mean()


def test_chunks_of_logits_have_a_checkpoint_each() -> None:
    for loss in (lambda chunk: chunk.pow(2).mean(), lambda chunk: chunk.logsumexp(-1).mean()):
        assert _same(lambda y, of=loss: sum(_plain(of, chunk) for chunk in y.split(2, 1)))


def test_selective_checkpointing_pairs_the_products_of_the_function_alone() -> None:
    other = torch.randn(CLASSES, 3, dtype=torch.float64, requires_grad=True)
    assert _same(lambda y: _KINDS["selective"](lambda y: _mse(y) + (y.flatten(0, 1).mm(other)).mm(other.t()).mean(), y))


@pytest.mark.parametrize("loss", _LOSSES.values(), ids=_LOSSES)
def test_reentrant_checkpointing_is_stock(loss: Loss) -> None:
    assert _same(lambda y: checkpoint(loss, y, use_reentrant=True))


@pytest.mark.parametrize("whole", [False, True])
def test_offloading_around_the_checkpoint_is_stock(whole: bool) -> None:
    def loss_of(y: Any) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return _plain(_cross_entropy, y) + (_plain(_mse, y) if whole else 0.0)

    assert _same(loss_of)


def test_logits_that_a_checkpointed_function_reads_by_chunks_stay_uncomputed() -> None:
    logits: Any = _model()()
    (_plain(_cross_entropy, logits) + _plain(_entropy, logits)).backward()
    assert type(logits) is LazyLogits
    assert logits.value is None


def test_the_second_run_computes_the_logits_no_second_time() -> None:
    logits: Any = _model()()
    values: list[Tensor] = []

    def loss_of(y: Any) -> Tensor:
        loss = _cross_entropy(y) + _mse(y)
        values.append(y.sin() * 0 + y)
        return loss + y.exp().mean()

    _plain(loss_of, logits, early_stop=False).backward()
    assert len(values) == 2
    assert torch.equal(*values)


def test_the_logits_are_freed_with_the_step() -> None:
    model = _model()
    gc.disable()
    try:
        logits: Any = model()
        loss = _plain(lambda y: _cross_entropy(y) + _mse(y), logits)
        loss.backward()
        kept = weakref.ref(logits.value)
        del logits, loss
        assert kept() is None
    finally:
        gc.enable()


def test_a_head_inside_the_checkpointed_function_is_stock() -> None:
    def gradients(patched: bool, loss: Loss, kind: str) -> list[Any]:
        model = _model(patched=patched)
        _KINDS[kind](lambda _: loss(model()), torch.ones((), requires_grad=True)).backward()
        return [each.grad for each in model.parameters()]

    for loss, kind in itertools.product(_LOSSES.values(), _KINDS):
        torch.testing.assert_close(gradients(True, loss, kind), gradients(False, loss, kind))


def test_without_the_name_of_a_call_checkpointed_logits_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memopt.torch_compat.modules._Call", ())
    assert all(_same(lambda y, of=loss: _plain(of, y) + _mse(y)) for loss in _LOSSES.values())


def test_the_reasons_name_a_checkpoint_inside_another() -> None:
    model = _model()
    _KINDS["inside another, closure"](_cross_entropy, model())
    (reason,) = whole_logits(model)
    assert "a checkpointed function inside another one reads them" in reason
