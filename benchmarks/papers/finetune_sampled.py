"""What sampled linears cost in a fine-tune: a pretrained encoder learns sentiment, every weight trained.

    python -m benchmarks.finetune_sampled                  the recipe `sampled`: what frees bytes is sampled
    python -m benchmarks.finetune_sampled --every-linear   with stock norms and activations: three linears of a block
    python -m benchmarks.finetune_sampled --check          exit 1 where the recipe's sampler loses accuracy
    python -m benchmarks.finetune_sampled --json FILE      also write the numbers, after every run

Model, sentences and pairing are those of `benchmarks.finetune`, but all weights are trained, over two epochs of a small
set, so that a sentence comes again and `remembered` can draw by the gradients of its last visit. Padding counts
as any other row until it was seen to get no gradient.

`accumulated` is the exact alternative at equal memory: micro-batches so small that their forward keeps no more than
the sampled recipe's forward of the whole batch, exact gradients, one optimizer step a batch.

With `--every-linear` norms and activations are the stock ones and attention is eager, so that the linears of a block,
but for query, key and value, whose input is the block's own, are the last holders of their inputs; noise comes from
sampling alone. Without it the codes of the recipe's activations add theirs. The rule of `--check` is that of
`benchmarks.finetune`, for the recipe's own sampler and for `accumulated`.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

import memopt
from benchmarks import finetune_task as finetune
from benchmarks.comparison import Row, falls_short, summarize, table
from benchmarks.finetune import collect
from benchmarks.finetune_task import Batch, CannotRun, Gradients, Task
from benchmarks.measure import EXIT_CANNOT_RUN, EXIT_OK, EXIT_SHORT, version
from benchmarks.training import Run, relative_error
from benchmarks.ways import AGAIN, STOCK
from memopt.trace.account import account

SEEDS, EPOCHS, TRAINED, TESTS = 5, 2, 768, 512
LEARNING_RATE = 1e-4
ACCUMULATED = "accumulated"
#: Keys of the recipe under which the linears of a block, but for q, k and v, are the last holders of their inputs.
EVERY = ("norms.method=none", "activations.method=none", "activations.code=none", "activations.relu=none")


@dataclass(frozen=True)
class Variant:
    """One way to train."""

    name: str
    method: str
    budget: float
    remembers: bool = False

    def changes(self, every: bool) -> tuple[str, ...]:
        """Of the recipe `sampled`."""
        return (f"linears.method={self.method}", f"linears.budget={self.budget}", *(EVERY if every else ()))


OWN = Variant("systematic 0.3", "systematic", 0.3)
VARIANTS = (
    OWN,
    Variant("wta-crs 0.3", "wta-crs", 0.3),
    Variant("wta-crs 0.1", "wta-crs", 0.1),
    Variant("uniform 0.3", "uniform", 0.3),
    Variant("systematic 0.3, remembered", "systematic", 0.3, remembers=True),
    Variant("wta-crs 0.3, remembered", "wta-crs", 0.3, remembers=True),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.seeds < 2:
        parser.error("--seeds must be at least 2, for a standard error")
    command = shlex.join(["python", "-m", "benchmarks.finetune_sampled", *(sys.argv[1:] if argv is None else argv)])
    try:
        task = finetune.load_task(TESTS)
    except CannotRun as error:
        print(error, file=sys.stderr)
        return EXIT_CANNOT_RUN
    task = Task(task.train[:: len(task.train) // TRAINED][:TRAINED], task.test)
    runs = collect(
        lambda seed: runs_of(task, seed, arguments.epochs, arguments.every_linear),
        arguments.seeds,
        arguments.json,
        lambda runs: document(runs, task, command, arguments.epochs, arguments.every_linear),
    )
    rows = summarize(runs)
    Console(width=None if sys.stdout.isatty() else 180).print(table(rows))
    lines = [row.way for row in rows if _is_judged(row) and falls_short(row, rows)]
    for line in lines:
        print(f"falls short: {line}", file=sys.stderr)
    return EXIT_SHORT if arguments.check and lines else EXIT_OK


def _is_judged(row: Row) -> bool:
    return row.way in (OWN.name, ACCUMULATED)


def runs_of(task: Task, seed: int, epochs: int, every: bool) -> Iterator[Run]:
    """Stock, stock again, every variant and accumulation from one start, on the same batches."""
    batches = list(finetune.epochs_of(task, epochs, seed))
    reference: Gradients = {}
    kept_by_own = 0
    for variant in (STOCK, AGAIN, *VARIANTS, ACCUMULATED):
        started = time.perf_counter()
        model, micro = build(seed, every), finetune.BATCH
        if variant == AGAIN:
            finetune.move_by_one_ulp(model.parameters(), seed)
        elif isinstance(variant, Variant):
            memopt.patch(model, memopt.load_recipe("sampled", variant.changes(every)))
        elif variant == ACCUMULATED:
            if not every:
                memopt.patch(model, "exact-unfolded")
            micro = _micro_batch(model, batches[0], kept_by_own)
        name = variant.name if isinstance(variant, Variant) else variant
        kept = _kept(model, _part(batches[0], 0, micro))
        kept_by_own = kept if variant == OWN else kept_by_own
        torch.manual_seed(seed)
        remembers = isinstance(variant, Variant) and variant.remembers
        gradients, losses = _train(model, batches, micro, remembers, task)
        reference = reference or gradients
        accuracy, loss = finetune.score(model, task.test)
        error = relative_error(gradients, reference)
        last = statistics.fmean(losses[-len(batches) // epochs :])
        seconds = (time.perf_counter() - started) / len(batches)
        yield Run(name, seed, accuracy, loss, error, kept, seconds, last)


def build(seed: int, every: bool) -> nn.Module:
    """The pretrained encoder with a new head, drawn from `seed`. No dropout."""
    torch.manual_seed(seed)
    attention = {"attn_implementation": "eager"} if every else {}
    model = finetune.pretrained(**attention)
    return model.train()


def _train(
    model: nn.Module, batches: Sequence[Batch], micro: int, remembers: bool, task: Task
) -> tuple[Gradients, list[float]]:
    """One step a batch, AdamW with a rate that falls to 0.

    Returns:
        All gradients of the first step, and the loss of every step.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=len(batches))
    if remembers:
        from memopt.sampling import remember_gradients

        remember_gradients(model, len(task.train), finetune.MOST_TOKENS)
    first: Gradients = {}
    losses: list[float] = []
    for batch in batches:
        optimizer.zero_grad()
        size, total = len(batch["labels"]), 0.0
        for start in range(0, size, micro):
            part = _part(batch, start, micro, indexed=remembers)
            loss = model(**part).loss * (len(part["labels"]) / size)
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        first = first or {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        schedule.step()
    return first, losses


def _part(batch: Batch, start: int, size: int, *, indexed: bool = False) -> Batch:
    """Some rows of a batch."""
    return {n: value[start : start + size] for n, value in batch.items() if indexed or n != finetune.INDEX}


def _kept(model: nn.Module, batch: Batch) -> int:
    return account(model, lambda: model(**batch).loss).saved


def _micro_batch(model: nn.Module, batch: Batch, most: int) -> int:
    """The largest micro-batch whose forward keeps no more than `most` bytes, of equal ones that make the batch."""
    sizes = (-(-finetune.BATCH // parts) for parts in itertools.count(1))
    return next(size for size in sizes if size == 1 or _kept(model, _part(batch, 0, size)) <= most)


def document(runs: Sequence[Run], task: Task, command: str, epochs: int, every: bool) -> dict[str, Any]:
    """The runs and their rows with what is needed to repeat them."""
    rows = summarize(runs)
    packages = ("torch", "transformers", finetune.DATA_PACKAGE)
    return {
        "command": command,
        "device": "cpu",
        "versions": {"python": platform.python_version()} | {name: version(name) for name in packages},
        "setting": {
            "model": finetune.MODEL,
            "trained": "every weight",
            "sampled": "output of attention, both linears of the MLP" if every else "where the recipe frees bytes",
            "data": "Rotten Tomatoes",
            "train": len(task.train),
            "test": len(task.test),
            "most_tokens": finetune.MOST_TOKENS,
            "batch": finetune.BATCH,
            "epochs": epochs,
            "learning_rate": LEARNING_RATE,
            "dtype": "torch.float32",
            "dropout": 0,
            "attention": "eager" if every else "sdpa",
            "threads": torch.get_num_threads(),
        },
        "rows": [asdict(row) for row in rows],
        "runs": [asdict(run) for run in runs],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--every-linear",
        action="store_true",
        help="with stock norms and activations",
    )
    parser.add_argument("--check", action="store_true", help="exit 1 where the recipe's sampler loses accuracy")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers with versions to FILE")
    parser.add_argument("--seeds", type=int, default=SEEDS, metavar="N", help=f"how many; {SEEDS} if left out")
    parser.add_argument("--epochs", type=int, default=EPOCHS, metavar="N", help=f"how many; {EPOCHS} if left out")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
