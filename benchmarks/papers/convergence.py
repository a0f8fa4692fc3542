"""Training to convergence over five seeds: the loss and the memory of every way to train, beside those of stock.

    python -m benchmarks.convergence                     print the table
    python -m benchmarks.convergence --check             and exit 1 where an exact way ends at a higher loss
    python -m benchmarks.convergence --json FILE --plot FILE
    python -m benchmarks.convergence --size gpu          the shape of Llama-1B in bf16, for a GPU

A byte-level Llama learns Python's language reference (in the standard library); a tenth of it, whole topics, is held
out. For each seed every way starts from the same weights and sees the same batches, so that differences are those of
the way. Each way runs in a fresh process. `stock again` is the noise floor: the stock model with every initial weight
moved by one unit in its last place, a difference that training carries on as it does any other.

The rule of `--check`, for the ways whose gradients are exact: the mean over seeds of (held-out loss - stock's) may not
be above 2 standard errors of that difference + 2 standard errors of the same difference of `stock again`. Others are
shown.

Peak and kept are bytes of live storages in forward, loss and backward of the first batch, without weights and
gradients.
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import random
import shlex
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import memopt
from benchmarks.finetune import AGAIN, STOCK, Spread, spread
from benchmarks.finetune_task import move_by_one_ulp
from benchmarks.measure import EXIT_OK, EXIT_SHORT, version, write_json
from memopt.reporting.timeline import step as followed

CHECKPOINTING = "checkpointing"
#: Ways to train whose gradients are exact, then the others.
EXACT = (STOCK, AGAIN, "exact-unfolded", "exact-levels", CHECKPOINTING)
WAYS = (*EXACT, "int8")
STANDARD_ERRORS = 2.0
MIB = 1 << 20


@dataclass(frozen=True)
class Size:
    """The model and its training."""

    layers: int = 2
    hidden: int = 128
    heads: int = 4
    batch: int = 8
    seq: int = 64
    steps: int = 300
    learning_rate: float = 1e-3
    dtype: str = "float32"
    device: str = "cpu"


SIZES = {"cpu": Size(), "gpu": Size(16, 2048, 32, 8, 1024, 2000, 3e-4, "bfloat16", "cuda")}


@dataclass(frozen=True)
class Run:
    """One training."""

    way: str
    seed: int
    curve: tuple[tuple[int, float], ...]
    """(step, held-out loss), the last after the last step."""
    peak: int
    kept: int
    seconds: float
    """Of a step, the mean."""

    @property
    def loss(self) -> float:
        return self.curve[-1][1]


@dataclass(frozen=True)
class Row:
    """A way over all seeds; the difference is to stock's run of the same seed."""

    way: str
    loss: Spread
    difference: Spread
    flat: float
    """By how much the mean loss still fell in the last tenth of the steps."""
    peak: int
    kept: int
    seconds: float


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    size = SIZES[arguments.size]
    size = replace(size, steps=arguments.steps or size.steps)
    given = sys.argv[1:] if argv is None else list(argv)
    runs: list[Run] = []
    for way in arguments.ways:
        # A process a way: what one of them leaves in caches or patches cannot reach the next.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            for seed in range(arguments.seeds):
                runs.append(pool.submit(train, way, seed, size).result())
                print(
                    f"{way}, seed {seed}: {runs[-1].loss:.4f}, {runs[-1].seconds * 1e3:.0f} ms a step", file=sys.stderr
                )
        if arguments.json is not None:
            command = shlex.join(["python", "-m", "benchmarks.convergence", *given])
            write_json(arguments.json, result(runs, command, size))
    rows = summarize(runs)
    Console(width=None if sys.stdout.isatty() else 120).print(table(rows))
    if arguments.plot is not None:
        plot(runs, rows, arguments.plot)
    missed = shortfalls(rows)
    for line in missed:
        print(f"falls short: {line}", file=sys.stderr)
    return EXIT_SHORT if arguments.check and missed else EXIT_OK


def result(runs: Sequence[Run], command: str, size: Size) -> dict[str, Any]:
    """The runs and their rows with what is needed to repeat them."""
    device = torch.cuda.get_device_name() if size.device == "cuda" else "cpu"
    versions = {"python": platform.python_version()} | {name: version(name) for name in ("torch", "transformers")}
    rows = [asdict(row) for row in summarize(runs)]
    setting = {"command": command, "device": device, "versions": versions, "size": asdict(size)}
    return {**setting, "rows": rows, "runs": [asdict(run) for run in runs]}


def train(way: str, seed: int, size: Size) -> Run:
    """Train one model; AdamW with a rate that falls to 0."""
    learnt, held = texts(size)
    model = build(way, seed, size)
    order = random.Random(seed)
    first = held[: size.batch]
    found = followed(model, lambda: model(input_ids=first, labels=first))
    model.zero_grad(set_to_none=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=size.steps)
    curve, spent = [(0, held_out(model, held, size))], 0.0
    for number in range(1, size.steps + 1):
        rows = learnt[order.sample(range(len(learnt)), size.batch)]
        begun = time.perf_counter()
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        spent += time.perf_counter() - begun
        schedule.step()
        if number % max(size.steps // 10, 1) == 0 or number == size.steps:
            curve.append((number, held_out(model, held, size)))
    return Run(way, seed, tuple(curve), found.peak, found.kept, spent / size.steps)


def build(way: str, seed: int, size: Size) -> LlamaForCausalLM:
    """The model of a seed, as `way` trains it."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=size.hidden,
        intermediate_size=size.hidden * 11 // 4,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        max_position_embeddings=size.seq,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(size.device, getattr(torch, size.dtype)).train()
    if way == AGAIN:
        move_by_one_ulp(model.parameters(), seed)
    elif way == CHECKPOINTING:
        model.gradient_checkpointing_enable()
    elif way != STOCK:
        memopt.patch(model, way)
    torch.manual_seed(seed)  # what rounds at random
    return model


def texts(size: Size) -> tuple[Tensor, Tensor]:
    """(rows to learn, rows held out) of bytes, each [rows, seq]: every tenth topic is held out."""
    names = sorted(topics)
    parts = ([name for number, name in enumerate(names) if (number % 10 == 0) == held] for held in (False, True))
    learnt, held = (torch.tensor(list("\n".join(topics[name] for name in part).encode())) for part in parts)
    cut = [ids[: len(ids) // size.seq * size.seq].view(-1, size.seq).to(size.device) for ids in (learnt, held)]
    return cut[0], cut[1]


@torch.no_grad()
def held_out(model: LlamaForCausalLM, rows: Tensor, size: Size) -> float:
    """Mean loss on at most 256 of the held-out rows, spread over all of them."""
    rows = rows[:: max(len(rows) // 256, 1)]
    chunks = rows.split(4 * size.batch)
    losses = [float(model(input_ids=chunk, labels=chunk).loss) * len(chunk) for chunk in chunks]
    return sum(losses) / len(rows)


def summarize(runs: Sequence[Run]) -> list[Row]:
    """A row for each way that ran with every seed of stock."""
    by_way: dict[str, dict[int, Run]] = {}
    for run in runs:
        by_way.setdefault(run.way, {})[run.seed] = run
    stock = by_way[STOCK]
    whole = {way: [its[seed] for seed in stock] for way, its in by_way.items() if its.keys() >= stock.keys()}
    return [_row(way, its, list(stock.values())) for way, its in whole.items()]


def _row(way: str, runs: Sequence[Run], stock: Sequence[Run]) -> Row:
    return Row(
        way,
        spread([run.loss for run in runs]),
        spread([run.loss - base.loss for run, base in zip(runs, stock, strict=True)]),
        sum(run.curve[-2][1] - run.loss for run in runs) / len(runs),
        runs[0].peak,
        runs[0].kept,
        sum(run.seconds for run in runs) / len(runs),
    )


def most_difference(row: Row, rows: Sequence[Row]) -> float:
    """The highest mean difference of the loss to stock's that `--check` lets pass."""
    floor = next((other.difference.error for other in rows if other.way == AGAIN), 0.0)
    return STANDARD_ERRORS * (row.difference.error + floor)


def shortfalls(rows: Sequence[Row]) -> list[str]:
    """One sentence for every exact way that ends at a higher loss than the seeds explain."""
    return [
        f"{row.way}: loss {row.difference.mean:+.4f} to stock, at most {most_difference(row, rows):+.4f} is explained"
        for row in rows
        if row.way in EXACT and row.way not in (STOCK, AGAIN) and not row.difference.mean <= most_difference(row, rows)
    ]


def table(rows: Sequence[Row]) -> Table:
    """For people; ± is the standard deviation over the seeds, then the standard error of the paired difference."""
    result = Table(title="Held-out loss at the end, and a step's memory", title_justify="left")
    result.add_column("way", no_wrap=True)
    for column in ("loss", "loss - stock", "explained", "last tenth", "kept MiB", "peak MiB", "ms a step"):
        result.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        judged = row.way in EXACT and row.way not in (STOCK, AGAIN)
        result.add_row(
            row.way,
            f"{row.loss.mean:.4f} ± {row.loss.deviation:.4f}",
            "" if row.way == STOCK else f"{row.difference.mean:+.1e} ± {row.difference.error:.1e}",
            f"<= {most_difference(row, rows):+.1e}" if judged else "",
            f"{-row.flat:+.4f}",
            f"{row.kept / MIB:.1f}",
            f"{row.peak / MIB:.1f}",
            f"{row.seconds * 1e3:.0f}",
        )
    return result


def plot(runs: Sequence[Run], rows: Sequence[Row], path: Path) -> None:
    """Draw the held-out losses of all seeds, and the peaks."""
    from matplotlib.figure import Figure

    figure = Figure((9, 3.6), layout="constrained")
    losses, peaks = figure.subplots(1, 2, width_ratios=(3, 2))
    for number, row in enumerate(rows):
        for run in (run for run in runs if run.way == row.way):
            label = row.way if run.seed == 0 else None
            losses.plot(*zip(*run.curve, strict=True), color=f"C{number}", label=label, linewidth=0.8)
    losses.set(xlabel="step", ylabel="held-out loss", title="Every seed of every way")
    losses.legend(fontsize=8)
    bars = peaks.barh(
        [row.way for row in rows], [row.peak / MIB for row in rows], color=[f"C{n}" for n in range(len(rows))]
    )
    peaks.bar_label(bars, fmt="%.1f", padding=2, fontsize=8)
    peaks.invert_yaxis()
    peaks.set(xlabel="MiB", title="Peak of a step, without weights")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", choices=SIZES, default="cpu", help="the model and its training")
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="how many, at least 2")
    parser.add_argument("--steps", type=int, metavar="N", help="of the optimizer")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), metavar="NAME", help="ways to train; stock is first")
    parser.add_argument("--check", action="store_true", help="exit 1 where an exact way ends at a higher loss")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all runs with versions to FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw losses and peaks (needs matplotlib)")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
