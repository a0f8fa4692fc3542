"""Runs of ways to train, side by side: a row for each way, the rules of `--check`, the table and the picture.

Differences are taken within a seed. What the rules are, and why, stands at the top of benchmarks/finetune.py.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from benchmarks.training import Run
from benchmarks.ways import AGAIN, EXACT, STOCK

#: Recipes that are there as the published methods, or whose gradients are right on average alone.
NOT_JUDGED = ("lowmemory-bp", "sampled", "wta-crs")
STANDARD_ERRORS = 2.0
#: By the triangle inequality, where the way is off an fp64 run by at most twice as much as stock.
MOST_ROUNDING = 3.0
MIB = 1 << 20


@dataclass(frozen=True)
class Spread:
    """Mean over the seeds, standard deviation (of a sample), standard error of the mean."""

    mean: float
    deviation: float
    error: float


@dataclass(frozen=True)
class Row:
    """A way over all seeds; differences are to stock's run of the same seed."""

    way: str
    loss: Spread
    loss_difference: Spread
    accuracy: Spread | None
    accuracy_difference: Spread | None
    gradient_error: float
    rounding: float | None
    """Of stock's gradients in fp64; None where that was not computed."""
    kept: float
    """Share of stock's bytes."""
    kept_bytes: int
    peak: int
    reserved: int | None
    seconds: float
    flat: float
    """By how much the mean loss still fell in the last tenth of the steps."""
    train_loss_difference: Spread | None = None


def summarize(runs: Sequence[Run]) -> list[Row]:
    """One row for each way, over the seeds that every way has run with; none where these are fewer than two."""
    by_way: dict[str, dict[int, Run]] = {}
    for run in runs:
        by_way.setdefault(run.way, {})[run.seed] = run
    seeds = sorted(set.intersection(*(set(of_seed) for of_seed in by_way.values()))) if by_way else []
    if len(seeds) < 2:
        return []
    stock = [by_way[STOCK][seed] for seed in seeds]
    return [_row(way, [of_seed[seed] for seed in seeds], stock) for way, of_seed in by_way.items()]


def _row(way: str, runs: Sequence[Run], stock: Sequence[Run]) -> Row:
    pairs = list(zip(runs, stock, strict=True))
    roundings = [base.rounding for base in stock if base.rounding is not None]
    return Row(
        way,
        spread([run.loss for run in runs]),
        spread([run.loss - base.loss for run, base in pairs]),
        _spread([run.accuracy for run in runs]),
        _difference([(run.accuracy, base.accuracy) for run, base in pairs]),
        statistics.fmean([run.gradient_error for run in runs]),
        statistics.fmean(roundings) if roundings else None,
        statistics.fmean([run.kept / base.kept for run, base in pairs]),
        runs[0].kept,
        runs[0].peak,
        runs[0].reserved,
        statistics.median([run.seconds for run in runs]),
        statistics.fmean([run.curve[-2][1] - run.loss if len(run.curve) > 1 else 0.0 for run in runs]),
        _difference([(run.train_loss, base.train_loss) for run, base in pairs]),
    )


def spread(values: Sequence[float]) -> Spread:
    deviation = statistics.stdev(values)
    return Spread(statistics.fmean(values), deviation, deviation / math.sqrt(len(values)))


def _spread(values: Sequence[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    return spread(known) if len(known) == len(values) else None


def _difference(pairs: Sequence[tuple[float | None, float | None]]) -> Spread | None:
    return _spread([None if one is None or other is None else one - other for one, other in pairs])


# --- the verdict ---------------------------------------------------------------------------------------------------


def least_accuracy(row: Row, rows: Sequence[Row]) -> float:
    """The lowest paired difference of accuracy that `--check` lets pass; not a number where there is none."""
    floor = next((other for other in rows if other.way == AGAIN), None)
    if row.accuracy_difference is None or floor is None or floor.accuracy_difference is None:
        return math.nan
    return -STANDARD_ERRORS * (row.accuracy_difference.error + floor.accuracy_difference.error)


def most_loss(row: Row, rows: Sequence[Row]) -> float:
    """The highest paired difference of the loss that `--check` lets pass."""
    floor = next((other.loss_difference.error for other in rows if other.way == AGAIN), 0.0)
    return STANDARD_ERRORS * (row.loss_difference.error + floor)


def is_judged(row: Row) -> bool:
    return row.way not in (STOCK, AGAIN, *NOT_JUDGED) and (row.way in EXACT or row.accuracy is not None)


def falls_short(row: Row, rows: Sequence[Row]) -> bool:
    return bool(_complaints(row, rows))


def shortfalls(rows: Sequence[Row]) -> list[str]:
    """One sentence for every way that learns less than the rules allow, whose gradient is not exact, or that cannot
    be judged."""
    return [f"{row.way}: {complaint}" for row in rows for complaint in _complaints(row, rows)]


def _complaints(row: Row, rows: Sequence[Row]) -> list[str]:
    found = []
    if is_judged(row) and row.accuracy_difference is not None:
        mean, least = row.accuracy_difference.mean, least_accuracy(row, rows)
        if not mean >= least:
            found.append(f"accuracy {mean:+.2%} to stock, at least {least:+.2%} is asked for")
    if is_judged(row) and row.way in EXACT:
        mean, most = row.loss_difference.mean, most_loss(row, rows)
        if not mean <= most:
            found.append(f"loss {mean:+.2g} to stock, at most {most:+.2g} is explained")
        if row.rounding is not None and not row.gradient_error <= MOST_ROUNDING * row.rounding:
            found.append(f"gradient off by {row.gradient_error:.2g}, rounding explains {row.rounding:.2g}")
    return found


# --- for people ----------------------------------------------------------------------------------------------------


def table(rows: Sequence[Row], title: str = "Fine-tune of MiniLM-L6") -> Table:
    """The rows; ± is a standard deviation over the seeds in the first columns, then the standard error of the paired
    difference."""
    result = Table(title=title, title_justify="left")
    result.add_column("way", no_wrap=True)
    columns: dict[str, Callable[[Row], str]] = {
        "accuracy": lambda row: _pair(row.accuracy, ".2%"),
        "loss": lambda row: _pair(row.loss, ".4f"),
        "accuracy - stock": lambda row: _pair(row.accuracy_difference, "+.2%") if row.way != STOCK else "",
        "asked for": lambda row: f">= {least_accuracy(row, rows):+.2%}" if is_judged(row) else "",
        "loss - stock": lambda row: _pair(row.loss_difference, "+.1e") if row.way != STOCK else "",
        "explained": lambda row: f"<= {most_loss(row, rows):+.1e}" if is_judged(row) and row.way in EXACT else "",
        "training loss - stock": lambda row: _pair(row.train_loss_difference, "+.4f") if row.way != STOCK else "",
        "gradient off": lambda row: f"{row.gradient_error:.1e}" if row.way != STOCK else "",
        "last tenth": lambda row: f"{-row.flat:+.3f}",
        "kept": lambda row: f"{row.kept:.1%}",
        "kept MiB": lambda row: f"{row.kept_bytes / MIB:.1f}",
        "peak MiB": lambda row: f"{row.peak / MIB:.1f}",
        "reserved MiB": lambda row: "" if row.reserved is None else f"{row.reserved / MIB:.0f}",
        "ms": lambda row: f"{row.seconds * 1e3:.0f}",
        "/ stock": lambda row: f"{row.seconds / rows[0].seconds:.2f}",
    }
    shown = {name: cell for name, cell in columns.items() if name not in _hidden(rows)}
    for name in shown:
        result.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = (cell(row) for cell in shown.values())
        result.add_row(row.way, *cells, style="bold red" if falls_short(row, rows) else None)
    return result


def _hidden(rows: Sequence[Row]) -> set[str]:
    """Columns that no row has something for."""
    hidden = set()
    if all(row.accuracy is None for row in rows):
        hidden |= {"accuracy", "accuracy - stock", "asked for"}
    if all(row.train_loss_difference is None for row in rows):
        hidden.add("training loss - stock")
    if not any(is_judged(row) and row.way in EXACT for row in rows):
        hidden.add("explained")
    if not any(row.peak for row in rows):
        hidden |= {"last tenth", "kept MiB", "peak MiB", "ms", "/ stock"}
    if all(row.reserved is None for row in rows):
        hidden.add("reserved MiB")
    return hidden


def _pair(value: Spread | None, form: str) -> str:
    if value is None:
        return ""
    second = value.error if form.startswith("+") else value.deviation
    return f"{value.mean:{form}} ± {second:{form.lstrip('+')}}"


def plot(runs: Sequence[Run], rows: Sequence[Row], path: Path) -> None:
    """Draw the held-out losses of all seeds, and the peaks."""
    from matplotlib.figure import Figure

    figure = Figure((9, 3.6), layout="constrained")
    losses, peaks = figure.subplots(1, 2, width_ratios=(3, 2))
    for number, row in enumerate(rows):
        for run in (run for run in runs if run.way == row.way):
            # Ways that lie upon each other are told apart by ever thinner lines.
            width, label = 3.2 * 0.75**number, row.way if run.seed == 0 else None
            losses.plot(*zip(*run.curve, strict=True), color=f"C{number}", label=label, linewidth=width)
    losses.set(xlabel="step", ylabel="held-out loss", title="Every seed of every way")
    losses.legend(fontsize=8)
    colours = [f"C{number}" for number in range(len(rows))]
    bars = peaks.barh([row.way for row in rows], [row.peak / MIB for row in rows], color=colours)
    peaks.bar_label(bars, fmt="%.1f", padding=2, fontsize=8)
    peaks.invert_yaxis()
    peaks.margins(x=0.15)
    peaks.set(xlabel="MiB", title="Peak of a step, without weights")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
