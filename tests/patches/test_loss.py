"""The loss over logits that are never whole: the stock loss and the stock gradients, of many families."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from memopt.api import plan_for
from memopt.kernels.loss.reference import LossArguments
from memopt.patches.apply import apply, undo
from memopt.patches.loss import losses, plain, readers, rows
from memopt.patches.loss.checks import verify_losses
from memopt.patches.loss.lazy import LazyLogits
from memopt.patches.loss.module import patch_head
from memopt.torch_compat import TorchDispatchMode
from memopt.trace.account import account
from memopt.walk.aten.precision import precise
from tests.factories import randomise_vectors_, tiny_inputs, tiny_model
from tests.patches.logit_cases import in_chunks
from tests.support.largest import Largest

ROWS, WIDTH, CLASSES = 24, 16, 200
LOSS_ONLY = (
    *(f"{key}.method=none" for key in ("norms", "activations", "gated_mlps", "softmaxes")),
    "loss.method=chunked",
)


@pytest.fixture(autouse=True, params=["by blocks of columns", "at once"])
def way(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    """Several chunks of any head here, by each way to take it; a note that the logits are whole is an error."""
    in_chunks(monkeypatch, lambda x: 64 * x.element_size(), ROWS=8, COLUMNS=64)
    monkeypatch.setattr(plain.Plain, "is_at_once", request.param == "at once")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*computed whole.*")
        yield request.param


class Model(nn.Module):
    """A head behind one linear; `loss(logits, labels)` reads what it returns."""

    def __init__(self, *, bias: bool = False, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(8, WIDTH, dtype=dtype)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias, dtype=dtype)
        self.x = torch.randn(4, ROWS // 4, 8, dtype=dtype)

    def forward(self) -> Tensor:
        logits: Tensor = self.head(self.body(self.x))
        return logits


def models(*, lean: bool = False, **options: Any) -> tuple[Model, Model]:
    """A stock model, and one whose head is patched."""
    stock, ours = Model(**options), Model(**options)
    patch_head(ours.head, WIDTH, CLASSES, lean=lean)
    return stock, ours


def labels(ignored: int = 5) -> Tensor:
    found = torch.randint(0, CLASSES, (ROWS,), generator=torch.Generator().manual_seed(1))
    found[:ignored] = -100
    return found


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {name: gradient for name, gradient in zip(names, found, strict=True) if gradient is not None}


def assert_close(ours: dict[str, Tensor], stock: dict[str, Tensor], bound: float = 1e-10) -> None:
    assert ours.keys() == stock.keys()
    largest = max(float(gradient.abs().max()) for gradient in stock.values())
    for name, gradient in stock.items():
        assert float((ours[name] - gradient).abs().max()) <= bound * largest, name


def compare(read: Any, *, bias: bool = False, lean: bool = False) -> None:
    """``read(logits)`` of a patched head and of a stock one: the same number and gradients, never computed whole."""
    stock, ours = models(bias=bias, lean=lean)
    expected = read(stock())
    logits = ours()
    assert isinstance(logits, LazyLogits)
    found = read(logits)
    assert logits.value is None
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10, equal_nan=True)
    total = [torch.nan_to_num(each, 0.0).square().sum() if each.dim() else each for each in (found, expected)]
    assert_close(gradients(ours, total[0]), gradients(stock, total[1]))


def flat(logits: Tensor) -> Tensor:
    return logits.view(-1, CLASSES)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_cross_entropy(reduction: str, smoothing: float, weighted: bool, bias: bool) -> None:
    weight = torch.rand(CLASSES, dtype=torch.float64) if weighted else None
    options: Any = {"reduction": reduction, "label_smoothing": smoothing, "weight": weight}
    compare(lambda logits: F.cross_entropy(flat(logits), labels(), **options), bias=bias)


def teacher() -> Tensor:
    return torch.randn(4, ROWS // 4, CLASSES, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def forbidden(logits: Tensor, columns: Any, value: float = -1e4) -> Tensor:
    logits[..., columns] = value
    return logits


SCALE = torch.tensor(0.3, dtype=torch.float64)
BY_COLUMN = torch.linspace(-1, 1, CLASSES, dtype=torch.float64)
READS = {
    "none is ignored": lambda y: F.cross_entropy(flat(y), labels(0)),
    "all are ignored, sum": lambda y: F.cross_entropy(flat(y), labels(ROWS), reduction="sum"),
    "another index is ignored": lambda y: F.cross_entropy(flat(y), labels(0).clamp(0, 3), ignore_index=3),
    "soft targets": lambda y: F.cross_entropy(flat(y), BY_COLUMN.softmax(0).expand(ROWS, -1)),
    "soft, smoothed": lambda y: F.cross_entropy(flat(y), torch.eye(ROWS, CLASSES).double(), label_smoothing=0.1),
    "a scale": lambda y: F.cross_entropy(flat(y * 0.25), labels()),
    "a quotient": lambda y: F.cross_entropy(flat(y / 7), labels()),
    "a cap": lambda y: F.cross_entropy(flat(torch.tanh(y / 30) * 30), labels()),
    "a tensor of one element": lambda y: F.cross_entropy(flat(SCALE * y), labels()),
    "one number a column": lambda y: F.cross_entropy(flat(y + BY_COLUMN), labels()),
    "a cap, then columns": lambda y: F.cross_entropy(flat(2 * y.tanh() - BY_COLUMN[None, None]), labels()),
    "forbidden tokens": lambda y: F.cross_entropy(flat(forbidden(y, [3, 7, CLASSES - 1])), labels()),
    "forbidden tokens by a mask": lambda y: F.cross_entropy(flat(forbidden(y, BY_COLUMN > 0.5)) * 0.5, labels()),
    "a range of forbidden tokens": lambda y: F.log_softmax(forbidden(y, slice(5, 90)), -1).exp().amax(-1).sum(),
    "a shift": lambda y: F.cross_entropy(y[..., :-1, :].reshape(-1, CLASSES), labels()[4:]),
    "rows by a mask": lambda y: F.cross_entropy(flat(y)[labels(0) % 2 == 0], labels(0)[labels(0) % 2 == 0]),
    "rows by numbers": lambda y: F.cross_entropy(y[:, 2], labels()[::6]),
    "a module": lambda y: nn.CrossEntropyLoss(label_smoothing=0.1)(flat(y), labels()),
    "log_softmax and nll_loss": lambda y: F.nll_loss(F.log_softmax(flat(y), -1), labels()),
    "log_softmax and gather": lambda y: -y.log_softmax(-1).gather(-1, labels(0).view(4, -1, 1)).sum(),
    "distillation": lambda y: F.kl_div(F.log_softmax(y / 2, -1), teacher().softmax(-1), reduction="batchmean"),
    "distillation by a sum": lambda y: F.kl_div(flat(y).log_softmax(-1), flat(teacher()).softmax(-1), reduction="sum"),
    "distillation of logs": lambda y: nn.KLDivLoss(reduction="mean", log_target=True)(
        y.log_softmax(-1), teacher().log_softmax(-1)
    ),
    "logsumexp": lambda y: y.logsumexp(-1).mean(),
    "entropy": lambda y: -(y.softmax(-1) * F.log_softmax(y, dim=-1)).sum(-1).mean(),
    "topk": lambda y: y.topk(3).values.sum(),
    "max": lambda y: y.max(-1).values.sum(),
    "parts": lambda y: sum(F.cross_entropy(part[:, 0], labels(0)[:2]) for part in y.split(2)),
    "two losses": lambda y: F.cross_entropy(flat(y), labels()) + F.cross_entropy(flat(y), labels(0), reduction="sum"),
}  # fmt: skip


@pytest.mark.parametrize("name", READS)
def test_what_a_model_does_with_its_logits(name: str) -> None:
    compare(READS[name])


@pytest.mark.parametrize("name", ["a cap", "a shift", "none is ignored", "another index is ignored", "a module"])
def test_the_lean_loss(name: str) -> None:
    compare(READS[name], lean=True)


def test_the_lean_loss_keeps_no_wide_copy() -> None:
    kept = []
    for method in ("none", "lean"):
        model = tiny_model("llama", torch.bfloat16, vocab_size=1000, tie_word_embeddings=False)
        given = {"input_ids": torch.arange(96).view(2, 48) + 3}
        if method != "none":
            apply(model, plan_for(model, _recipe("loss.method=lean")))
        kept.append(account(model, lambda model=model, given=given: model(**given, labels=given["input_ids"]).loss))
    logits = 96 * 1000
    assert kept[0].total - kept[1].total == pytest.approx(2 * logits, rel=0.02)


def test_a_mean_over_nothing_is_nan_without_a_gradient() -> None:
    compare(lambda logits: F.cross_entropy(flat(logits), labels(ROWS)))


def test_what_a_tensor_that_scales_learns() -> None:
    learned = []
    for model in models():
        scale, shift = torch.tensor([0.3]).double().requires_grad_(), BY_COLUMN.clone().requires_grad_()
        loss = F.cross_entropy(flat(torch.tanh(model() * scale) + shift), labels())
        learned.append(torch.autograd.grad(loss, (scale, shift)))
    torch.testing.assert_close(learned[1], learned[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("frozen", [["body"], ["head"], ["body", "head.weight"]])
def test_what_is_frozen_gets_no_gradient(frozen: list[str]) -> None:
    found = []
    for patched in (False, True):
        model = Model(bias=True)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(name.startswith(each) for each in frozen))
        if patched:
            patch_head(model.head, WIDTH, CLASSES)
        found.append(gradients(model, F.cross_entropy(flat(model()), labels())))
    assert_close(found[1], found[0])


# -- that a test can fail -------------------------------------------------------------------------------------------


def _chunk_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("blocks", "chunks"):
        every = getattr(plain.Plain, name)
        monkeypatch.setattr(plain.Plain, name, lambda self, given, every=every: list(every(self, given))[1:])


def _operations_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (losses, plain):
        monkeypatch.setattr(module, "run", lambda operations, y, columns: y * 1.0)


def _ignored_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "LossArguments", lambda weight, smoothing, _: LossArguments(weight, smoothing, -1))
    monkeypatch.setattr(readers, "_has_values", lambda target: False)


def _mean_over_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "weight_of_all", lambda target, arguments, dtype: torch.tensor(float(len(target))))


FAULTS = {
    "a chunk is left out": (_chunk_dropped, READS["none is ignored"]),
    "a scale is forgotten": (_operations_forgotten, READS["a scale"]),
    "a cap is forgotten": (_operations_forgotten, READS["a cap"]),
    "ignored rows count": (_ignored_counted, READS["another index is ignored"]),
    "the mean is over ignored rows too": (_mean_over_all, READS["a scale"]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, read = FAULTS[name]
    compare(read)
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        compare(read)


# -- models ---------------------------------------------------------------------------------------------------------

_SMALL: dict[str, Any] = {
    "vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "dropout": 0.0,
    "attention_dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
_BART = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0.0, "vocab_size": 67,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": ("GraniteForCausalLM", {**_SMALL, "logits_scaling": 4.0}),
    "cohere": ("CohereForCausalLM", {**_SMALL, "logit_scale": 0.25}),
    "bert": ("BertForMaskedLM", _SMALL),
    "roberta": ("RobertaForMaskedLM", _SMALL),
    "bart": ("BartForConditionalGeneration", _BART),
    "distilbert": ("DistilBertForMaskedLM", {**_SMALL, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}),
    "gpt_neox": ("GPTNeoXForCausalLM", _SMALL),
}  # fmt: skip
TINY = ("llama", "gemma2", "gpt2", "t5", "opt", "qwen3")


def build(family: str, dtype: torch.dtype = torch.float64, **settings: Any) -> nn.Module:
    if family in TINY:
        return tiny_model(family, dtype, **settings)
    torch.manual_seed(0)
    class_name, config = FAMILIES[family]
    cls = getattr(transformers, class_name)
    model: nn.Module = cls(cls.config_class(**{**config, **settings}))
    randomise_vectors_(model)
    for buffer in model.buffers():  # BART adds one to its logits
        if buffer.is_floating_point() and buffer.shape[-1] == 67:
            nn.init.normal_(buffer)
    return model.to(dtype)


def inputs(family: str, ignored: int = 5) -> dict[str, Tensor]:
    ids = torch.randint(3, 67, (2, 12), generator=torch.Generator().manual_seed(3))
    found = dict(tiny_inputs(family, 2, 12)) if family in TINY else {"input_ids": ids}
    marked = ids.clone()
    marked.view(-1)[:ignored] = -100
    return {**found, "labels": marked}


def step(model: nn.Module, given: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    with precise(torch.float64):
        output = model(**given)
        return output, gradients(model, output.loss)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", [*TINY, *FAMILIES])
@pytest.mark.rotates(3)
def test_families(family: str, tied: bool) -> None:
    model = build(family, tie_word_embeddings=tied).train()
    given = inputs(family)
    expected, stock = step(model, given)
    applied = apply(model, plan_for(model, _recipe()))
    assert applied.done.keys() == {"loss"}, applied.refused
    found, ours = step(model, given)
    assert isinstance(found.logits, LazyLogits)
    assert found.logits.value is None
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-10, atol=0)
    assert_close(ours, stock)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(found.logits.as_subclass(Tensor), expected.logits, rtol=1e-10, atol=1e-10)
    assert undo(model) == 1
    assert type(model(**given).logits) is Tensor


def _recipe(*settings: str) -> Any:
    from memopt.plan.recipe import load_recipe

    return load_recipe("exact-unfolded", [*LOSS_ONLY, *settings])


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("autocast", [False, True])
def test_in_16_bits_it_is_as_close_as_the_stock_loss(
    family: str, autocast: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (rows, plain):
        monkeypatch.setattr(module, "chunk_bytes", lambda x: 2**16)
    given = {"input_ids": torch.randint(3, 4000, (8, 32)), "labels": torch.randint(3, 4000, (8, 32))}
    settings = {"vocab_size": 4000, "tie_word_embeddings": False}
    truth = tiny_model(family, torch.float64, **settings)
    model = tiny_model(family, torch.float32 if autocast else torch.bfloat16, **settings)
    truth.load_state_dict(model.state_dict())
    true, exact = step(truth, given)

    def run() -> tuple[float, float]:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(**given).loss
        found = gradients(model, loss)["lm_head.weight"].double()
        return abs(float(loss.detach()) - float(true.loss.detach())), float((found - exact["lm_head.weight"]).norm())

    stock = run()
    apply(model, plan_for(model, _recipe()))
    ours = run()
    assert ours[0] <= stock[0] + 1e-6 * float(true.loss.detach())
    assert ours[1] <= 1.1 * stock[1]


@pytest.mark.parametrize("patched", [False, True])
def test_no_tensor_is_as_large_as_the_logits(patched: bool) -> None:
    model = tiny_model("llama", vocab_size=1000, tie_word_embeddings=False)
    given = {"input_ids": torch.randint(3, 1000, (4, 32))}
    if patched:
        apply(model, plan_for(model, _recipe()))
    with Largest() as watch:
        model(**given, labels=given["input_ids"]).loss.backward()
    largest = 1000 * 64  # the gradient of the head's weight
    assert (watch.elements <= largest) is patched


class Products(TorchDispatchMode):
    """The shapes of the products that are tensors of their own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self.shapes.append(tuple(result.shape))
        return result


@pytest.mark.parametrize("way", ["by blocks of columns"], indirect=True)  # at once it is a sum over chunks of rows
@pytest.mark.parametrize("transposed", [False, True])
def test_the_gradient_of_the_weight_is_written_where_it_lies(transposed: bool, way: str) -> None:
    stock, ours = Model(), Model()
    for model in (stock, ours):
        torch.manual_seed(2)
        model.head = Conv1D(CLASSES, WIDTH).double() if transposed else model.head
    patch_head(ours.head, WIDTH, CLASSES)
    loss = F.cross_entropy(flat(ours()), labels(0))
    with Products() as watch:
        found = gradients(ours, loss)
    assert_close(found, gradients(stock, F.cross_entropy(flat(stock()), labels(0))))
    of_columns = [shape for shape in watch.shapes if WIDTH in shape and max(shape) > ROWS]
    assert watch.shapes
    assert not of_columns


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_verify_proves_the_losses_of_a_head(fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    head = nn.Linear(WIDTH, CLASSES, dtype=torch.float64)
    patch_head(head, WIDTH, CLASSES)
    if fault is not None:
        FAULTS[fault][0](monkeypatch)
    try:
        (check,) = verify_losses({"head": head}, 1e-9)
        passes = check.status == "pass"
    except IndexError:  # a label that is ignored is no class
        passes = False
    # Nothing is done to these logits, so forgetting that shows nowhere.
    assert passes is (fault is None or "forgotten" in fault)


def test_losses_of_parts_keep_one_gradient_of_the_weight(way: str) -> None:
    (_, model), kept = models(), []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.shape == model.head.weight.shape and tensor.data_ptr() != model.head.weight.data_ptr():
            kept.append(tensor)
        return tensor

    for step in range(2):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            parts = zip(model().split(1), labels(0).split(6), strict=True)
            loss = sum(F.cross_entropy(flat(part), target) for part, target in parts)
        assert len(kept) == (step + 1 if way == "at once" else 0)
        loss.backward()
