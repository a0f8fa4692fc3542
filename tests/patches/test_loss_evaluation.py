"""A loss without gradients is computed in parts; whoever reads the logits gets those of the stock head, to the bit."""

from __future__ import annotations

import copy
import io
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import memopt
from memopt.patches.loss import lazy, plain, rows
from memopt.patches.loss.lazy import LazyLogits
from memopt.patches.loss.module import patch_head
from memopt.plan.recipe import load_recipe
from tests.factories import tiny_inputs, tiny_model
from tests.patches.logit_cases import in_chunks
from tests.patches.test_loss import CLASSES, LOSS_ONLY, ROWS, WIDTH, Model, labels, models
from tests.support.compare import stock_and_patched
from tests.support.largest import Largest
from tests.support.ranks import run_ranks

RECIPE = load_recipe("exact-unfolded", LOSS_ONLY)
OFF = [torch.no_grad, torch.inference_mode]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several chunks; a warning is an error, since reading logits is what evaluations do."""
    in_chunks(monkeypatch, lambda x: 64 * 12, COLUMNS=64)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="memopt")
        yield


def pair(dtype: torch.dtype = torch.float32, *, bias: bool = False) -> tuple[Model, Model]:
    """A patched head and a stock one."""
    stock, ours = models(bias=bias, dtype=dtype)
    return ours, stock


LOSSES: dict[str, Callable[[Any], Tensor]] = {
    "mean": lambda y: F.cross_entropy(y.view(-1, CLASSES).float(), labels()),
    "of each row": lambda y: F.cross_entropy(y.flatten(0, 1), labels(), reduction="none"),
    "smoothed": lambda y: F.cross_entropy(y.flatten(0, 1), labels(), label_smoothing=0.1),
    "soft targets": lambda y: F.cross_entropy(y.flatten(0, 1), torch.eye(ROWS, CLASSES, dtype=y.dtype)),
    "capped": lambda y: F.cross_entropy((5 * torch.tanh(y / 5)).flatten(0, 1), labels()),
    "of log_softmax": lambda y: F.nll_loss(F.log_softmax(y.view(-1, CLASSES), -1), labels()),
    "of fewer columns": lambda y: F.cross_entropy(y[..., :150].float().flatten(0, 1), labels().clamp(max=149)),
    "of fewer rows": lambda y: F.cross_entropy(y[:, :-1].flatten(0, 1), labels()[4:]),
}


@pytest.mark.parametrize("off", OFF)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_loss_is_computed_in_parts(name: str, dtype: torch.dtype, off: Any) -> None:
    ours, stock = pair(dtype, bias=True)
    with off():
        logits, whole = ours(), stock()
        found, expected = LOSSES[name](logits), LOSSES[name](whole)
    assert isinstance(logits, LazyLogits)
    assert logits.value is None
    assert found.dtype == expected.dtype
    # A logit may round otherwise in another product, which moves a loss by twice as much; each loss is rounded too.
    eps = max(torch.finfo(dtype).eps, torch.finfo(expected.dtype).eps)
    bound = 4 * eps * float(whole.abs().max() + expected.abs().max())
    assert float((found - expected).abs().max()) <= bound
    assert torch.equal(logits.as_subclass(Tensor), whole)


def test_a_frozen_model_evaluates_where_gradients_are_on() -> None:
    ours, stock = (model.requires_grad_(False) for model in pair())
    logits = ours()
    assert isinstance(logits, LazyLogits)
    torch.testing.assert_close(LOSSES["mean"](logits), LOSSES["mean"](stock()))
    assert logits.value is None
    assert not logits.requires_grad


READS: dict[str, Callable[[Any], Any]] = {
    "argmax": lambda y: y.argmax(-1),
    "argmax of a cast": lambda y: y.float().argmax(-1),
    "max": lambda y: y.max(-1).values,
    "topk": lambda y: y.topk(5).values,
    "probabilities": lambda y: y.softmax(-1),
    "log-probabilities of tokens": lambda y: y.log_softmax(-1).gather(-1, labels(0).view(4, -1, 1)),
    "the last row": lambda y: y[:, -1, :].clone().float(),
    "shifted": lambda y: y[..., :-1, :].contiguous().logsumexp(-1),
    "capped": lambda y: 5 * torch.tanh(y / 5),
    "some columns": lambda y: y[..., :7].sum(-1),
    "a sum": lambda y: y.sum(),
    "numpy": lambda y: torch.from_numpy(y.detach().float().cpu().numpy()),
    "tolist": lambda y: torch.tensor(y.tolist()),
    "pickle": lambda y: pickle.loads(pickle.dumps(y)),
    "deepcopy": lambda y: copy.deepcopy(y),
    "cat": lambda y: torch.cat([y, y]),
    "written to": lambda y: y.masked_fill_(y < 0, -1.0),
    "padded": lambda y: F.pad(y, (0, 0, 0, 3), value=-100),
    "an operator of torch.ops": lambda y: torch.ops.aten.relu(y),
}


@pytest.mark.parametrize("after_a_loss", [False, True])
@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whoever_reads_the_logits_gets_the_stock_ones(name: str, dtype: torch.dtype, after_a_loss: bool) -> None:
    ours, stock = pair(dtype)
    with torch.no_grad():
        logits, whole = ours(), stock()
        if after_a_loss:
            LOSSES["mean"](logits)
        found, expected = READS[name](logits), READS[name](whole)
    assert torch.equal(torch.as_tensor(found).as_subclass(Tensor), expected)


def test_saving_logits_saves_those_of_the_stock_model() -> None:
    ours, stock = pair()
    file = io.BytesIO()
    with torch.no_grad():
        torch.save(ours(), file)
        file.seek(0)
        assert torch.equal(torch.load(file), stock())


# -- what changed between the forward and the reader ---------------------------------------------------------------


def _exchanged(model: Model) -> None:
    """As averaged weights are."""
    model.head.weight.data.copy_(model.head.weight.data + 1)


def _stepped(model: Model) -> None:
    with torch.no_grad():
        model.head.weight.add_(1)


def _replaced(model: Model) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach() + 1)


@pytest.mark.parametrize("change", [_exchanged, _stepped, _replaced])
@pytest.mark.parametrize("read", [lambda y: y.argmax(-1), LOSSES["mean"]])
@pytest.mark.parametrize("off", OFF)
def test_other_weights_than_those_of_the_forward_are_an_error(change: Any, read: Any, off: Any) -> None:
    ours, _ = pair()
    with off():
        logits = ours()
    change(ours)
    with off(), pytest.raises(RuntimeError, match="weights of their head, or its input, were changed"):
        read(logits)


def test_an_input_that_was_written_to_in_inference_mode_is_an_error() -> None:
    ours, _ = pair()
    seen: list[Tensor] = []
    ours.body.register_forward_hook(lambda module, args, out: seen.append(out))
    with torch.inference_mode():
        logits = ours()
        seen[0].mul_(2)  # without a version counter
        with pytest.raises(RuntimeError, match="its input, were changed"):
            logits.argmax(-1)


def test_not_a_number_is_no_change() -> None:
    ours, stock = pair()
    with torch.no_grad():
        for model in (ours, stock):
            model.head.weight[0, 0] = torch.nan
        assert torch.equal(ours().isnan(), stock().isnan())


# -- heads whose logits are not left for later ---------------------------------------------------------------------


class _Switched(nn.Module):
    """A linear with an adapter that can be switched off, as PEFT's."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear, self.adapter, self.on = linear, nn.Linear(WIDTH, CLASSES, bias=False), True

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y + self.adapter(x) if self.on else y


def test_a_head_with_a_switch_is_computed_while_it_is_set() -> None:
    model = Model(dtype=torch.float32)
    model.head = _Switched(model.head)  # type: ignore[assignment]
    patch_head(model.head, WIDTH, CLASSES)
    with torch.no_grad():
        logits = model()
        expected = F.linear(model.body(model.x), model.head.linear.weight + model.head.adapter.weight)
        model.head.on = False  # type: ignore[assignment]
    torch.testing.assert_close(logits, expected)
    assert type(logits) is Tensor


def test_logits_of_one_chunk_and_of_one_token_a_row_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = pair()
    with torch.no_grad():
        x = ours.body(ours.x)
        assert type(ours.head(x[:, -1:])) is Tensor
        assert type(ours.head(x)) is LazyLogits
        monkeypatch.undo()
        assert type(ours.head(x)) is Tensor


# -- models of transformers -----------------------------------------------------------------------------------------


def built(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    return tiny_model(name, dtype, vocab_size=300).eval()


@pytest.mark.parametrize("off", OFF)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "t5", "qwen3"])
def test_a_model_with_labels(name: str, autocast: bool, off: Any) -> None:
    given: dict[str, Any] = dict(tiny_inputs(name, 8, 12))
    given.setdefault("labels", given["input_ids"].clone())
    stock, ours = built(name), memopt.patch(built(name), RECIPE)
    with off(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = stock(**given)
        with Largest() as largest:
            found = ours(**given)
            loss = found.loss
        assert isinstance(found.logits, LazyLogits)
        assert found.logits.value is None
        assert largest.elements < found.logits.numel()
        eps = torch.finfo(torch.bfloat16 if autocast else torch.float32).eps
        assert abs(float(loss - expected.loss)) <= 4 * eps * float(expected.logits.abs().max() + expected.loss)
    assert torch.equal(found.logits.as_subclass(Tensor), expected.logits)


@pytest.mark.parametrize(
    "how",
    [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 5}, {"use_cache": False}, {"prompt_lookup_num_tokens": 2}],
    ids=str,
)
def test_generate_is_bitwise_stock(how: dict[str, Any]) -> None:
    prompt = torch.randint(3, 60, (1, 9), generator=torch.Generator().manual_seed(0))
    given: Any = {"input_ids": prompt, "max_new_tokens": 12, "output_logits": True, "return_dict_in_generate": True}
    found = []
    for model in stock_and_patched(lambda: built("llama"), RECIPE):
        torch.manual_seed(0)
        found.append(model.generate(**given, **how))
    assert torch.equal(found[0].sequences, found[1].sequences)
    assert all(map(torch.equal, found[0].logits, found[1].logits))


def test_generate_calls_the_stock_head(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    stand_for = lazy.stand_for
    monkeypatch.setattr("memopt.patches.loss.module.stand_for", lambda *a: made.append(a) or stand_for(*a))
    model: Any = memopt.patch(built("llama"), RECIPE)
    model.generate(torch.tensor([[5, 6, 7, 8]] * 4), max_new_tokens=5, do_sample=False)
    assert made == []
    with torch.no_grad():
        model(torch.tensor([[5, 6, 7, 8]] * 4))
    assert len(made) == 1


# -- transformers' Trainer ------------------------------------------------------------------------------------------


class Data(torch.utils.data.Dataset[Any]):
    """Rows of other lengths, so that logits are padded before they are gathered."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(3, 300, (40 + index // 2,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids.masked_fill(ids % 5 == 0, -100)}


def accuracy(prediction: Any) -> dict[str, float]:
    logits, wanted = torch.as_tensor(prediction.predictions), torch.as_tensor(prediction.label_ids)
    guessed = logits if logits.dim() == 2 else logits.argmax(-1)
    counted = wanted[:, 1:] != -100
    hits = float((guessed[:, :-1] == wanted[:, 1:])[counted].float().mean())
    return {"accuracy": hits, "sum": float(logits.double().sum())}


EVALUATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "the loss alone": ({"prediction_loss_only": True}, {}),
    "no metrics": ({}, {}),
    "metrics": ({}, {"compute_metrics": accuracy}),
    "metrics of what argmax leaves": (
        {}, {"compute_metrics": accuracy, "preprocess_logits_for_metrics": lambda logits, wanted: logits.argmax(-1)},
    ),
    "in bf16": ({"bf16": True}, {"compute_metrics": accuracy}),
    "batches that are moved at once": ({"eval_accumulation_steps": 1}, {"compute_metrics": accuracy}),
}  # fmt: skip


@pytest.mark.parametrize("name", EVALUATIONS)
def test_trainer_evaluates_as_with_the_stock_model(name: str, tmp_path: Path) -> None:
    settings, more = EVALUATIONS[name]
    found, largest = [], []
    for model in stock_and_patched(lambda: built("llama"), RECIPE):
        arguments = transformers.TrainingArguments(
            str(tmp_path), per_device_eval_batch_size=2, report_to=[], use_cpu=True, disable_tqdm=True, **settings
        )
        trainer = transformers.Trainer(model, arguments, eval_dataset=Data(), **more)
        with Largest() as most:
            metrics = trainer.evaluate()
        found.append(
            {key: value for key, value in metrics.items() if key in ("eval_loss", "eval_accuracy", "eval_sum")}
        )
        largest.append(most.elements)
    loss = [each.pop("eval_loss") for each in found]
    eps = torch.finfo(torch.bfloat16 if settings.get("bf16") else torch.float32).eps
    assert loss[1] == pytest.approx(loss[0], rel=4 * eps)
    assert found[1] == found[0]
    assert ("eval_accuracy" in found[0]) is ("compute_metrics" in more)
    logits = 2 * 42 * 300
    assert largest[0] >= logits
    assert (largest[1] < logits) is not bool(more)


# -- two ranks ------------------------------------------------------------------------------------------------------


def evaluate(rank: int, folder: str, ways: list[str]) -> None:
    from accelerate import PartialState
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    assert PartialState(cpu=True).num_processes == 2
    for module in (rows, plain):
        module.chunk_bytes = lambda x: 64 * 12
    mesh = init_device_mesh("cpu", (2,))
    for how in ways:
        stock, ours = (_gathered(rank, how, mesh, patched) for patched in (False, True))
        for name, expected in stock.items():
            torch.testing.assert_close(ours[name], expected, rtol=1e-6 if name == "loss" else 0, atol=0, msg=how)
    torch.distributed.destroy_process_group()


def _gathered(rank: int, how: str, mesh: Any, patched: bool) -> dict[str, Tensor]:
    """The loss of an evaluation, and the logits of both ranks, read when the forward is over."""
    from accelerate.utils import gather, pad_across_processes
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    model: Any = built("llama")
    if patched:
        memopt.patch(model, RECIPE)
    if "fsdp" in how:
        fully_shard(model, mesh=mesh, reshard_after_forward="reshard" in how)
    else:
        model = DistributedDataParallel(model)
    given: dict[str, Any] = dict(tiny_inputs("llama", 2, 9 + rank))
    given["labels"] = given["input_ids"].clone()
    with torch.no_grad():
        output = model(**given)
        assert (type(output.logits) is LazyLogits) is (patched and "reshard" not in how), how
        padded = pad_across_processes(output.logits.detach(), dim=1, pad_index=-100)
        one = gather(output.logits[:, :9].contiguous())
        assert padded.shape[1] == 10
        assert len(one) == 4
        return {"loss": output.loss, "logits": gather(padded), "of one length": one}


@pytest.mark.slow
def test_what_two_ranks_gather_is_stock(tmp_path: Path) -> None:
    run_ranks(evaluate, tmp_path, ["ddp", "fsdp", "fsdp reshard"])


@pytest.mark.parametrize("inside", [False, True])
def test_a_head_that_runs_again_under_reentrant_checkpointing(inside: bool) -> None:
    """Its first run records nothing."""
    found = []
    for model in pair(torch.float64):
        h = model.body(model.x)

        def run(h: Tensor, head: nn.Module = model.head) -> Tensor:
            return LOSSES["mean"](head(h)) if inside else head(h)

        output = torch.utils.checkpoint.checkpoint(run, h, use_reentrant=True)
        loss = output if inside else LOSSES["mean"](output)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # logits that a region returns are whole, and said to be
            loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    for ours, stock in zip(*found, strict=True):
        torch.testing.assert_close(ours, stock, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "loss",
    [
        lambda y, teacher: F.cross_entropy(y.flatten(0, 1), teacher.flatten(0, 1).softmax(-1)),
        lambda y, teacher: F.cross_entropy(y.flatten(0, 1), target=teacher.flatten(0, 1).argmax(-1)),
        lambda y, teacher: -(teacher.softmax(-1) * y.log_softmax(-1)).sum(),
    ],
)
def test_a_teacher_is_read_as_values(loss: Any) -> None:
    found = []
    for student, teacher in zip(pair(torch.float64), pair(torch.float64), strict=True):
        with torch.no_grad():
            teacher.head.weight.mul_(2)
            known = teacher()
        logits = student()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = loss(logits, known)
        value.backward()
        found.append([value.detach(), *(parameter.grad for parameter in student.parameters())])
        if isinstance(logits, LazyLogits) and "log_softmax" not in loss.__code__.co_names:
            assert logits.value is None
    for ours, stock in zip(*found, strict=True):
        torch.testing.assert_close(ours, stock, rtol=1e-10, atol=1e-12)
