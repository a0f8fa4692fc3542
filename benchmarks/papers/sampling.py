"""The samplers of rows: right on average, as good as their formulas, and how they compare on pretrained models.

    python -m benchmarks.sampling            print the tables
    python -m benchmarks.sampling --check    and exit 1 where a number falls short

First table: 77 of 256 rows are drawn at least 4,000 times. `z` is how far the mean of the first 4,000 estimates of dW
is from dW, in standard errors (expected error / sqrt(draws)): below 3 counts as unbiased, and about 1 is what a perfect
sampler has. `variance` is the mean squared error over the formula's, from so many draws that its standard error is
below a third of the tolerance of 5 %. Errors are root mean squares relative to |dW|.

Second table: the formula on what the linears of pretrained models see in one step, median over the linears.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.sampling_models import BUDGETS, MODELS, Errors, measure
from memopt.kernels.sampled_linear.sampling import METHODS, Method
from tests.support.sampling_cases import (
    BUDGET,
    DRAWS,
    KEPT,
    LIMIT,
    ROUNDING,
    ROWS,
    Case,
    Outcome,
    cases,
    draw,
    outcome,
)

SEED = 0
#: Of the measured variance, relative to the formula's.
TOLERANCE = 0.05
MOST_DRAWS = 10 * DRAWS
#: Cases in which at most KEPT rows have a score; and one that has as many slots as rows.
EXACT = ("single row", "few rows", "k = rows")
FLAT = "flat"
#: The first of each two is to be no worse than the second on pretrained models.
ORDER: tuple[tuple[Method, Method], ...] = (("systematic", "wta-crs"), ("wta-crs", "crs"))


@dataclass(frozen=True)
class Row:
    """One sampler on one case."""

    first: Outcome
    """Of the first DRAWS draws."""
    all: Outcome
    """Of all of them."""

    @property
    def exact(self) -> bool:
        return self.all.case in EXACT


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="exit 1 where a number falls short")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers with versions to FILE")
    arguments = parser.parse_args(argv)
    rows = draw_all()
    errors = measure()
    lines = shortfalls(rows) + model_shortfalls(errors)
    console = Console(width=100 if not sys.stdout.isatty() else None)
    console.print(table(rows))
    console.print(model_table(errors))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(document(rows, errors), indent=2) + "\n")
    for line in lines:
        print(f"falls short: {line}", file=sys.stderr)
    return 1 if arguments.check and lines else 0


def draw_all() -> list[Row]:
    rows = [draw_case(case, method) for case in cases().values() for method in METHODS]
    heavy = cases()["heavy-tailed"]
    every_row = Case(EXACT[-1], heavy.x, heavy.dy, heavy.scores)
    return rows + [draw_case(every_row, method, k=ROWS) for method in METHODS]


def draw_case(case: Case, method: Method, k: int = KEPT) -> Row:
    """Draws until the measured variance is sharp enough. All methods begin with the same random numbers."""
    generator = torch.Generator().manual_seed(SEED)
    off = draw(case, method, DRAWS, generator, k)
    first = last = outcome(case, method, off, k)
    while last.spread > TOLERANCE / LIMIT and len(off) < MOST_DRAWS:
        off = torch.cat((off, draw(case, method, DRAWS, generator, k)))
        last = outcome(case, method, off, k)
    return Row(first, last)


def shortfalls(rows: Sequence[Row]) -> list[str]:
    """One sentence for every number of the first table that is not as it should be."""
    lines = [line for row in rows for line in row_shortfalls(row)]
    by_case = {(row.all.case, row.all.method): row.all for row in rows}
    for case in dict.fromkeys(row.all.case for row in rows):
        wta, crs = by_case[case, "wta-crs"], by_case[case, "crs"]
        if not wta.expected <= crs.expected:
            lines.append(f"{case}: WTA-CRS is expected to be off by {wta.expected:.4f}, CRS by {crs.expected:.4f}")
        if wta.measured**2 > crs.measured**2 * (1 + LIMIT * (wta.spread**2 + crs.spread**2) ** 0.5):
            lines.append(f"{case}: WTA-CRS is off by {wta.measured:.4f}, CRS by {crs.measured:.4f}")
        if case == FLAT and abs(wta.expected / crs.expected - 1) > ROUNDING:
            lines.append(f"{case}: WTA-CRS {wta.expected:.6f} and CRS {crs.expected:.6f} are not equal")
    return lines


def row_shortfalls(row: Row) -> list[str]:
    name, lines = f"{row.all.case}, {row.all.method}", []
    if not row.first.unbiased:
        lines.append(
            f"{name}: the mean of {row.first.draws} draws is off by {row.first.off:.2g}, z = {row.first.z:.2f}"
        )
    if not abs(row.all.ratio - 1) <= TOLERANCE:
        lines.append(f"{name}: the variance is {row.all.ratio:.3f} times the formula's")
    if row.exact and (row.all.expected or row.all.measured > ROUNDING):
        lines.append(f"{name}: not exact, off by {row.all.measured:.2g}, expected {row.all.expected:.2g}")
    return lines


def model_shortfalls(errors: Sequence[Errors]) -> list[str]:
    """One sentence for every order of samplers that is not as it should be, and for every model that is missing."""
    lines = [f"models/{name} is missing" for name in MODELS if name not in {row.model for row in errors}]
    return lines + [line for row in errors for line in order_shortfalls(row)]


def order_shortfalls(row: Errors) -> list[str]:
    where = f"{row.model}, scores {row.scores}, budget {row.budget:g}"
    return [
        f"{where}: {better} {row.errors[better]:.4f}, {worse} {row.errors[worse]:.4f}"
        for better, worse in ORDER
        if not row.errors[better] <= row.errors[worse]
    ]


def table(rows: Sequence[Row]) -> Table:
    """The first table for people."""
    result = Table(title=f"{KEPT} of {ROWS} rows (budget {BUDGET:g})", title_justify="left")
    for column in ("scores", "sampler"):
        result.add_column(column, no_wrap=True)
    for column in ("mean off by", "z", "error", "formula", "variance", "draws"):
        result.add_column(column, justify="right", no_wrap=True)
    for i, row in enumerate(rows):
        result.add_row(
            row.all.case,
            row.all.method,
            f"{row.first.off:.4f}" if row.first.off else "0",
            "exact" if row.exact else f"{row.first.z:.2f}",
            f"{row.all.measured:.4f}",
            f"{row.all.expected:.4f}",
            "-" if row.exact else f"{row.all.ratio:.3f} ± {row.all.spread:.3f}",
            str(row.all.draws),
            style="bold red" if row_shortfalls(row) else None,
            end_section=i + 1 < len(rows) and rows[i + 1].all.case != row.all.case,
        )
    return result


def model_table(errors: Sequence[Errors]) -> Table:
    """The second table for people."""
    result = Table(title="Pretrained models: error of dW, median over the linears", title_justify="left")
    for column in ("model", "linears", "scores", "budget", *METHODS):
        result.add_column(column, justify="left" if column in ("model", "scores") else "right", no_wrap=True)
    for i, row in enumerate(errors):
        result.add_row(
            row.model,
            str(row.linears),
            row.scores,
            f"{row.budget:g}",
            *(f"{row.errors[method]:.4f}" for method in METHODS),
            style="bold red" if order_shortfalls(row) else None,
            end_section=i + 1 < len(errors) and errors[i + 1].model != row.model,
        )
    return result


def document(rows: Sequence[Row], errors: Sequence[Errors]) -> dict[str, Any]:
    """The numbers with what is needed to repeat them."""
    return {
        "command": "python -m benchmarks.sampling --check",
        "device": "cpu",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "setting": {"rows": ROWS, "kept": KEPT, "draws": DRAWS, "seed": SEED, "budgets": BUDGETS},
        "rows": [
            {
                "z": row.first.z,
                "mean_off": row.first.off,
                "variance_ratio": row.all.ratio,
                **asdict(row.all),
                "passed": not row_shortfalls(row),
            }
            for row in rows
        ],
        "models": [asdict(row) for row in errors],
        "shortfalls": shortfalls(rows) + model_shortfalls(errors),
    }


if __name__ == "__main__":
    raise SystemExit(main())
