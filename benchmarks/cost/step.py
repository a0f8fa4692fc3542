"""Peak of a training step: the most bytes that live at one time over forward, loss and backward.

    python -m benchmarks.step                                print the table
    python -m benchmarks.step --case SmolLM2 --variants stock memopt --trained full    some of it
    python -m benchmarks.step --check                        and exit 1 where a limit is missed

Setting: bf16 weights, SDPA, no dropout; full tuning, or LoRA of rank 8 on all linears with fp32 adapters. Storages
count once, whoever refers to them. Parameters, their gradients, the batch and the optimizer do not count; the model's
output is held until backward has ended. Models of `models/` run on real tensors on the CPU; the large shapes on fake
tensors with the kernels that a CUDA device would choose (`--fake` does so for all).

`ck` is transformers' activation checkpointing. `cc` is a yardstick: a loss by hand, 16 chunks of rows whose logits are
computed again in backward. MiB are 2^20 bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import torch.nn.functional as F
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

import memopt
from benchmarks.measure import EXIT_OK, EXIT_SHORT, document, write_json
from memopt.torch_compat import FakeTensorMode
from memopt.trace.emulate import CudaChoices, unpadded_masks
from memopt.trace.fake import FiniteValues, make_fake
from memopt.trace.timeline import record
from memopt.trace.trace import activations

MODELS = Path(__file__).resolve().parents[2] / "models"
DTYPE = torch.bfloat16
CHUNKS = 16
MIB = 1 << 20
Trained = Literal["full", "lora"]
TRAINED: tuple[Trained, ...] = ("full", "lora")
#: Name -> what is done to the stock model, in this order.
VARIANTS: dict[str, tuple[str, ...]] = {
    name: tuple(name.split(" + ")) if name != "stock" else ()
    for name in ("stock", "memopt", "ck", "memopt + ck", "cc", "ck + cc", "memopt + cc", "memopt + ck + cc", "int8")
}


@dataclass(frozen=True)
class Case:
    """A model, the batch that it is trained on, and what the step may peak at."""

    name: str
    config: Callable[[], PreTrainedConfig]
    model: Any
    """The Auto class that builds it."""
    batch: int
    seq: int
    folder: str = ""
    """Of `models/`, for real tensors."""
    most: float | None = None
    """MiB, memopt."""
    most_checkpointed: float | None = None
    """MiB, memopt + ck."""
    layers: int = 1
    """Of the model; read where int8 is judged."""
    most_loss: float | None = None
    """Of the peak of memopt."""
    variants: tuple[str, ...] = ("stock", "memopt", "ck", "memopt + ck")


@dataclass(frozen=True)
class Row:
    """The step of one variant, in bytes."""

    case: str
    trained: Trained
    variant: str
    real: bool
    kept: int
    """What lives between forward and backward."""
    peak: int
    loss: int
    """The most bytes of logits, of what is computed from them and of their gradients that live at one time."""
    seconds: float


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="exit 1 where a limit is missed")
    parser.add_argument("--case", metavar="TEXT", help="only cases whose name contains TEXT")
    parser.add_argument("--trained", choices=TRAINED, help="only full tuning, or only LoRA")
    parser.add_argument("--variants", nargs="+", metavar="NAME", choices=VARIANTS, help="by default those of the case")
    parser.add_argument("--recipe", default="exact-unfolded", help="what memopt patches with")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys of the recipe to change")
    parser.add_argument("--fake", action="store_true", help="fake tensors for every model")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers with versions to FILE")
    arguments = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    transformers.utils.logging.disable_progress_bar()
    recipe = memopt.load_recipe(arguments.recipe, tuple(arguments.set))
    rows = []
    for case in CASES:
        if arguments.case and arguments.case.lower() not in case.name.lower():
            continue
        for trained in [arguments.trained] if arguments.trained else TRAINED:
            for variant in arguments.variants or case.variants:
                rows.append(measure(case, trained, variant, recipe=recipe, fake=arguments.fake or not case.folder))
                print(_line(rows[-1]), file=sys.stderr, flush=True)
    Console(width=None if sys.stdout.isatty() else 120).print(table(rows))
    if arguments.json:
        given = list(sys.argv[1:] if argv is None else argv)
        content = document(given, "benchmarks.step", dry_run=True, rows=[asdict(row) for row in rows])
        write_json(arguments.json, {**content, "dry_run": False})
    missed = misses(rows)
    for line in missed:
        print(f"falls short: {line}", file=sys.stderr)
    return EXIT_SHORT if arguments.check and missed else EXIT_OK


# --- one step --------------------------------------------------------------------------------------------------------


def measure(case: Case, trained: Trained, variant: str, *, recipe: memopt.Recipe, fake: bool = True) -> Row:
    """The peak of one step of a fresh model."""
    begun = time.perf_counter()
    torch.manual_seed(0)
    model = trained_model(case, trained, VARIANTS[variant], recipe=recipe, fake=fake)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    if fake:
        make_fake(model, mode)
    with faked(mode) if fake else contextlib.nullcontext():
        ids = torch.zeros(case.batch, case.seq, dtype=torch.long)
        if not fake:
            ids = torch.randint(3, 500, ids.shape)
        labels = ids if "SequenceClassification" not in case.model.__name__ else ids[:, 0].clone().zero_()
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
        only_loss = "cc" in VARIANTS[variant]  # its output has the head's input in place of logits
        found = activations(record(model, partial(_loss if only_loss else _output, model, inputs)))
    return Row(
        case.name,
        trained,
        variant,
        not fake,
        found.kept,
        found.peak.nbytes,
        found.most["loss"],
        round(time.perf_counter() - begun, 1),
    )


def _output(model: nn.Module, inputs: dict[str, Tensor]) -> Any:
    return model(**inputs)


def _loss(model: nn.Module, inputs: dict[str, Tensor]) -> Any:
    return SimpleNamespace(loss=model(**inputs).loss)


@contextlib.contextmanager
def faked(mode: FakeTensorMode) -> Iterator[None]:
    """Inside, a step on fake tensors takes the kernels of a CUDA device."""
    with mode, FiniteValues(), unpadded_masks(), CudaChoices():
        yield


def trained_model(case: Case, trained: Trained, done: Sequence[str], *, recipe: memopt.Recipe, fake: bool) -> nn.Module:
    """The model of `case` in train mode; without data if it is to be `fake`."""
    config = case.config()
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    config.use_cache = False
    if fake:
        with torch.device("meta"):
            base = case.model.from_config(config, dtype=DTYPE)
    else:
        base = case.model.from_pretrained(MODELS / case.folder, config=config, dtype=DTYPE)
    model: nn.Module = base
    if trained == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear"), low_cpu_mem_usage=fake)
    if "cc" in done:
        chunk_loss(base)
    if "memopt" in done:
        memopt.patch(model, recipe)
    if "int8" in done:
        memopt.patch(model, "int8")
    if "ck" in done:
        base.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


# --- the yardstick ---------------------------------------------------------------------------------------------------


def chunk_loss(model: PreTrainedModel) -> None:
    """Let the loss of a causal language model work on the head's input, by chunks of rows."""
    head = model.get_output_embeddings()
    head.forward = lambda hidden: hidden

    def loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
        targets = F.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
        return _ChunkedLoss.apply(logits.reshape(-1, logits.shape[-1]), head.weight, targets)

    model.loss_function = loss


class _ChunkedLoss(torch.autograd.Function):
    """Mean cross-entropy of ``rows @ weight.T``; logits exist for one chunk at a time, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        count = (targets >= 0).sum()
        ctx.save_for_backward(rows, weight, targets, count)
        total = rows.new_zeros((), dtype=torch.float32)
        for part in _chunks(rows.shape[0]):
            total += F.cross_entropy(F.linear(rows[part], weight).float(), targets[part], reduction="sum")
        return total / count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rows, weight, targets, count = ctx.saved_tensors
        of_rows = torch.empty_like(rows)
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for part in _chunks(rows.shape[0]):
            target = targets[part, None]
            p = torch.softmax(F.linear(rows[part], weight).float(), -1)
            p.scatter_add_(-1, target.clamp(min=0), p.new_full((), -1).expand(target.shape))
            p = p.mul_((target >= 0) * gradient / count).to(rows.dtype)
            of_rows[part] = p @ weight
            if of_weight is not None:
                of_weight.addmm_(p.t(), rows[part])
        return of_rows, of_weight, None


def _chunks(rows: int) -> Iterator[slice]:
    size = -(-rows // CHUNKS)
    return (slice(start, start + size) for start in range(0, rows, size))


# --- results ---------------------------------------------------------------------------------------------------------


def misses(rows: Sequence[Row]) -> list[str]:
    """What is above its limit, a sentence each."""
    found = {(row.case, row.trained, row.variant): row for row in rows}
    cases = {case.name: case for case in CASES}
    missed = []

    def miss(row: Row, limit: float, what: str) -> None:
        if row.peak > limit:
            where = f"{row.case}, {row.trained}, {row.variant}"
            missed.append(f"{where}: {row.peak / MIB:.1f} MiB, {what} {limit / MIB:.1f}")

    for row in rows:
        case = cases[row.case]
        limit = {"memopt": case.most, "memopt + ck": case.most_checkpointed}.get(row.variant)
        if limit is not None:
            miss(row, limit * MIB, "limit")
        if row.variant == "memopt" and case.most_loss is not None and row.loss > case.most_loss * row.peak:
            missed.append(f"{row.case}, {row.trained}: the loss takes {row.loss / row.peak:.1%} of the peak")
        ck, exact = (found.get((row.case, row.trained, variant)) for variant in ("ck", "memopt"))
        if row.variant == "memopt + ck" and ck is not None:
            miss(row, ck.peak, "ck alone")
        if row.variant == "int8" and exact is not None:
            # One block of the exact form is there while it is coded.
            miss(row, 1.1 * row.kept + exact.kept / case.layers, "what it keeps allows")
    return missed


def table(rows: Sequence[Row]) -> Table:
    """A line for each case, a column for each variant: MiB at the peak."""
    variants = [name for name in VARIANTS if any(row.variant == name for row in rows)]
    result = Table(title="Peak of a training step, MiB", title_justify="left")
    result.add_column("case", no_wrap=True)
    result.add_column("trained", no_wrap=True)
    for name in variants:
        result.add_column(name, justify="right")
    for case, trained in dict.fromkeys((row.case, row.trained) for row in rows):
        peaks = {row.variant: row.peak for row in rows if (row.case, row.trained) == (case, trained)}
        cells = (f"{peaks[name] / MIB:.0f}" if name in peaks else "" for name in variants)
        result.add_row(case, trained, *cells)
    return result


def _line(row: Row) -> str:
    return (
        f"{row.case}, {row.trained}, {row.variant}: kept {row.kept / MIB:.1f}, peak {row.peak / MIB:.1f} MiB"
        f" ({row.seconds:.0f} s)"
    )


def _of(folder: str) -> Callable[[], PreTrainedConfig]:
    def config() -> PreTrainedConfig:
        if not (MODELS / folder).is_dir():
            raise SystemExit(f"models/{folder} is missing; get it with: python examples/demo/fetch_models.py {folder}")
        found: PreTrainedConfig = transformers.AutoConfig.from_pretrained(MODELS / folder)
        return found

    return config


def _llama_1b() -> PreTrainedConfig:
    return transformers.LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, vocab_size=128256, tie_word_embeddings=True,
    )  # fmt: skip


def _llama_8b() -> PreTrainedConfig:
    return transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192,
    )  # fmt: skip


def _bert_large() -> PreTrainedConfig:
    return transformers.BertConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16, vocab_size=30522
    )


_SMOL, _MINILM = "SmolLM2-135M-Instruct", "all-MiniLM-L6-v2"
_CAUSAL, _MASKED = transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM
_CLASSES = transformers.AutoModelForSequenceClassification
_ALL = tuple(name for name in VARIANTS if name != "int8")
CASES = (
    Case("SmolLM2-135M, 4 x 512", _of(_SMOL), _CAUSAL, 4, 512, _SMOL, 780, 120, layers=30, variants=(*_ALL, "int8")),
    Case("MiniLM masked LM, 16 x 128", _of(_MINILM), _MASKED, 16, 128, _MINILM),
    Case("MiniLM classifier, 32 x 128", _of(_MINILM), _CLASSES, 32, 128, _MINILM),
    Case("BERT-large shape, masked LM, 8 x 512", _bert_large, _MASKED, 8, 512),
    Case("Llama-1B shape, 1 x 4096", _llama_1b, _CAUSAL, 1, 4096, "", 3600, 602, variants=_ALL),
    Case("Llama-3-8B shape, 1 x 8192", _llama_8b, _CAUSAL, 1, 8192, most_loss=0.02),
)


if __name__ == "__main__":
    raise SystemExit(main())
